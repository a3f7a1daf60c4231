"""Shows that a caller knows the deployment's secret: a token in the metadata of each call.

    paceline-token: <unix ms> "." HMAC-SHA-256(secret, tag ‖ unix ms), hex

It counts for a minute around its time, so that one that leaks is of no use later. Who can read the
connections, which TLS (core/tls.py) prevents, can use a token while it counts.
"""

import hmac
import time
from collections.abc import Iterable

from paceline.core.errors import IncompatiblePeer

TOKEN = "paceline-token"
MAX_AGE_S = 60.0

Metadata = tuple[tuple[str, str], ...]


def metadata(secret: bytes) -> Metadata:
    """For `metadata=` of a call to a router or a worker; made anew for each call."""
    now_ms = round(time.time() * 1000)
    return ((TOKEN, f"{now_ms}.{_digest(now_ms, secret)}"),)


def check(given: Iterable[tuple[str, str | bytes]], secret: bytes) -> None:
    """Raises IncompatiblePeer unless the metadata of a call has a token that counts now."""
    made_ms, _, digest = str(dict(given).get(TOKEN, "")).partition(".")
    if not (made_ms.isdecimal() and made_ms.isascii() and len(made_ms) < 20):
        raise IncompatiblePeer("the call has no token of this deployment", field="secret")
    if not hmac.compare_digest(digest.encode(), _digest(int(made_ms), secret).encode()):
        raise IncompatiblePeer("the caller has another secret", field="secret")
    age_s = time.time() - int(made_ms) / 1000
    if abs(age_s) > MAX_AGE_S:
        reason = f"the caller's clock differs by {age_s:.0f} s, or its token is an old one"
        raise IncompatiblePeer(reason, field="secret")


def _digest(unix_ms: int, secret: bytes) -> str:
    return hmac.digest(secret, b"pl-call1" + str(unix_ms).encode(), "sha256").hex()
