"""Encryption between the services of a deployment: mutual TLS with one set of certificates.

Every service shows PACELINE_TLS_CERT, and asks its peer for a certificate that PACELINE_TLS_CA has
signed for PACELINE_TLS_NAME. The name stands for the deployment, not for a host: workers come and
go, and are reached by address. Files are read again when they change, for connections made then.
"""

import functools
import os
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import structlog

from paceline.core.config import setting
from paceline.core.errors import ConfigError
from paceline.core.tls_reasons import SET_UP, reason_of

ENCRYPTIONS = ("auto", "required")
_log = structlog.get_logger("paceline.tls")
_check = ConfigError.check


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Encryption between services, one for all; none without certificates."""

    env_prefix: ClassVar[str] = "PACELINE_TLS_"

    ca: Path = setting(Path(), "PEM file of the authorities that sign the services' certificates.")
    cert: Path = setting(Path(), "PEM file of this service's certificate, then of its signers.")
    key: Path = setting(Path(), "PEM file of the certificate's private key.")
    name: str = setting("paceline", "DNS name that the certificate of every service carries.")
    encryption: str = setting(
        "auto", "required: refuse to run unencrypted; auto: encrypt where certificates are given."
    )
    fabric_encrypted: bool = setting(
        False, "The network itself encrypts what ucx and nixl move; where encryption is required."
    )

    def __post_init__(self) -> None:
        """Raises ConfigError, also for files that would not make a connection."""
        for field in ("ca", "cert", "key"):
            complete = getattr(self, field) != Path() or not self.is_on
            _check(f"tls_{field}", "", complete, f"two files of three: {SET_UP}")
        _check("tls_name", self.name, bool(self.name), "must be a DNS name")
        choices = f"must be one of {', '.join(ENCRYPTIONS)}"
        _check("tls_encryption", self.encryption, self.encryption in ENCRYPTIONS, choices)
        met = self.is_on or self.encryption != "required"
        _check("tls_encryption", self.encryption, met, f"needs certificates: {SET_UP}")
        certificates(self)

    @property
    def is_on(self) -> bool:
        return any(path != Path() for path in (self.ca, self.cert, self.key))

    @property
    def confines(self) -> bool:
        """Whether nothing may leave a host outside of TLS."""
        return self.encryption == "required" and not self.fabric_encrypted


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the files held when they were read: PEM texts, and contexts made of them."""

    ca: bytes
    cert: bytes
    key: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    expires_unix_s: float


class Certificates:
    """The files of one TlsConfig. Thread-safe. Made and read by `certificates`."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError for files that would not make a connection."""
        self.name = config.name
        self._files = (config.ca, config.cert, config.key)
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._current = self._read()

    def current(self) -> Credentials:
        """The same object until the files change. New files that are of no use are not taken: a
        log tells why, and those before them count on."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._current = self._read()
                    _log.info("new certificates")
                except ConfigError as error:
                    _log.error("new certificates are not taken", reason=error.message)
            return self._current

    def _stamp_now(self) -> list[tuple[int, int, int]]:
        stamp = []
        for path in self._files:
            with suppress(OSError):
                status = os.stat(path)
                stamp.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return stamp

    def _read(self) -> Credentials:
        ca, cert, key = self._files
        pem_ca, pem_cert = _read_file(ca, "tls_ca"), _read_file(cert, "tls_cert")
        pem_key = _read_file(key, "tls_key")
        try:
            server = _context(ssl.PROTOCOL_TLS_SERVER, ca, cert, key)
            client = _context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key)
            server.num_tickets = 0  # nobody resumes; a reader that is idle has nothing to read
            expires_unix_s = _meet(server, client, self.name)
        except ssl.SSLError as error:
            reason = f"with its key and authorities it makes no connection: {reason_of(error)}"
            raise ConfigError("tls_cert", str(cert), reason) from None
        changed = self._stamp_now() != self._stamp
        _check("tls_cert", str(cert), not changed, "changed while it was read")
        return Credentials(pem_ca, pem_cert, pem_key, server, client, expires_unix_s)


@functools.cache
def certificates(config: TlsConfig) -> Certificates | None:
    """What all connections of this process share; None where nothing is encrypted."""
    return Certificates(config) if config.is_on else None


def credentials(config: TlsConfig) -> Credentials | None:
    """What a connection uses that is made now; None where nothing is encrypted."""
    shared = certificates(config)
    return shared.current() if shared else None


def carries(name: str, certificate: dict[str, object]) -> bool:
    """Whether a peer's `certificate`, as `getpeercert` has it, is one of this deployment."""
    names = certificate.get("subjectAltName", ())
    return isinstance(names, tuple) and ("DNS", name) in names


def _context(protocol: int, ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ca)
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _no_password() -> str:
    """OpenSSL would ask on the terminal."""
    return ""


def _meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> float:
    """A handshake with ourselves, in memory: what a peer would object to raises SSLError here.
    Returns when the certificate expires."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialing = client.wrap_bio(to_client, to_server, server_hostname=name)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (dialing, answering, dialing, answering):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = dialing.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _read_file(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None


PLAIN = TlsConfig()
