"""Certificates of tests, mounted as a kubelet mounts a Secret: one symbolic link swaps them."""

import itertools
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography.x509 import load_pem_x509_certificate

from paceline.core.tls import TlsConfig

NAME = "paceline"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
_numbers = itertools.count()


@dataclass(slots=True)
class Mount:
    """A folder with ca.crt, tls.crt and tls.key of one authority."""

    folder: Path
    authority: trustme.CA = field(default_factory=trustme.CA)
    trusted: list[trustme.CA] = field(default_factory=list)  # beside it

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.issue()
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (self.folder / name).symlink_to(f"..data/{name}")

    def issue(self, name: str = NAME, *, expired: bool = False, days: int = 1) -> None:
        """Replaces the certificate, all three files at once."""
        not_after = LONG_AGO if expired else datetime.now(UTC) + timedelta(days=days)
        issued = self.authority.issue_cert(name, not_after=not_after)
        data = self.folder / f"..{next(_numbers)}"
        data.mkdir()
        authorities = [self.authority, *self.trusted]
        (data / "ca.crt").write_bytes(b"".join(ca.cert_pem.bytes() for ca in authorities))
        (data / "tls.crt").write_bytes(b"".join(p.bytes() for p in issued.cert_chain_pems))
        (data / "tls.key").write_bytes(issued.private_key_pem.bytes())
        (self.folder / "..next").symlink_to(data.name)
        os.replace(self.folder / "..next", self.folder / "..data")

    def config(self, **settings: object) -> TlsConfig:
        files = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
        paths: dict[str, object] = {name: self.folder / path for name, path in files.items()}
        return TlsConfig(**paths | settings)  # type: ignore[arg-type]

    @property
    def environment(self) -> dict[str, str]:
        """For services."""
        config = self.config()
        files = (config.ca, config.cert, config.key)
        names = ("PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")
        return dict(zip(names, map(str, files), strict=True))

    def serial(self) -> int:
        """Of the certificate that is mounted."""
        return load_pem_x509_certificate((self.folder / "tls.crt").read_bytes()).serial_number
