"""Why a TLS handshake failed, in words that tell what to mend. No paths or addresses in them."""

import ssl

SET_UP = "give every service PACELINE_TLS_CA, PACELINE_TLS_CERT and PACELINE_TLS_KEY"

NAME = "the peer's certificate does not carry the name of PACELINE_TLS_NAME"
_STRANGER = "the peer's certificate is of an authority not in PACELINE_TLS_CA"
_PLAIN = f"the peer does not speak TLS: {SET_UP}"
_SIGNS = {  # in what OpenSSL, BoringSSL and gRPC say
    "certificate has expired": "the peer's certificate has expired",
    "certificate is not yet valid": "the peer's certificate is not valid yet",
    "local issuer certificate": _STRANGER,
    "self-signed certificate": _STRANGER,
    "self signed certificate": _STRANGER,
    "hostname mismatch": NAME,
    "hostname verification check failed": NAME,
    "wrong_version_number": _PLAIN,
    "record_layer_failure": _PLAIN,
    "http_request": _PLAIN,
    "alert_certificate_expired": "the peer refuses our certificate: it has expired",
    "alert_unknown_ca": "the peer refuses our certificate: its authority is not among the peer's",
    "certificate_required": "the peer asks for a certificate, which we have not",
    "peer_did_not_return": "the peer has no certificate",
    "key_values_mismatch": "PACELINE_TLS_KEY is not the key of PACELINE_TLS_CERT",
}


def known_reason(text: str) -> str:
    """What the text of a library means; empty where it is not about TLS."""
    text = text.lower()
    return next((reason for sign, reason in _SIGNS.items() if sign in text), "")


def reason_of(error: ssl.SSLError) -> str:
    said = getattr(error, "verify_message", "") or error.reason or "TLS failed"
    return known_reason(said) or said.replace("_", " ").lower()
