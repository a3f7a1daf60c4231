"""Settings of TLS, and what becomes of files that change."""

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.config import parse
from paceline.core.errors import ConfigError
from paceline.core.metrics import TLS_CERTIFICATE_EXPIRES
from paceline.core.tls import PLAIN, TlsConfig, credentials
from paceline.core.tls_metrics import CertificateMetrics
from paceline.router.config import RouterConfig
from tests.support.certificates import Mount

SECRET = {"PACELINE_ROUTER_SECRET": "s" * 16}


def test_every_service_reads_the_same_variables(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls")
    config = parse(RouterConfig, [], SECRET | mount.environment, "router")
    assert config.tls == mount.config() and config.tls.is_on
    by_flag = parse(RouterConfig, ["--tls-name", "other"], SECRET, "router")
    assert by_flag.tls == TlsConfig(name="other") and not by_flag.tls.is_on


def test_one_file_alone_is_refused(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls")
    environment = SECRET | mount.environment
    del environment["PACELINE_TLS_KEY"]
    with pytest.raises(ConfigError, match="PACELINE_TLS_KEY") as caught:
        parse(RouterConfig, [], environment, "router")
    assert caught.value.field == "tls_key"


def test_required_encryption_needs_certificates() -> None:
    with pytest.raises(ConfigError, match="needs certificates: give every service PACELINE_TLS_CA"):
        TlsConfig(encryption="required")
    with pytest.raises(ConfigError, match="tls_encryption='on': must be one of auto, required"):
        TlsConfig(encryption="on")


def test_files_that_no_peer_would_take_are_refused_at_the_start(tmp_path: Path) -> None:
    mount, other = Mount(tmp_path / "tls"), Mount(tmp_path / "other")
    config = mount.config()
    with pytest.raises(ConfigError, match="not the key of PACELINE_TLS_CERT"):
        TlsConfig(ca=config.ca, cert=config.cert, key=other.config().key)
    with pytest.raises(ConfigError, match="of an authority not in PACELINE_TLS_CA"):
        TlsConfig(ca=other.config().ca, cert=config.cert, key=config.key)
    with pytest.raises(ConfigError, match="does not carry the name of PACELINE_TLS_NAME"):
        mount.config(name="another")
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        TlsConfig(ca=tmp_path / "none", cert=config.cert, key=config.key)
    assert caught.value.field == "tls_ca"
    other.issue(expired=True)
    with pytest.raises(ConfigError, match="has expired"):
        other.config(fabric_encrypted=True)


def test_files_are_read_again_when_they_change_and_only_then(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls")
    config = mount.config()
    first = credentials(config)
    assert first is not None and credentials(config) is first
    mount.issue()
    second = credentials(config)
    assert second is not None and second.cert == config.cert.read_bytes() != first.cert
    assert second.key == config.key.read_bytes()
    assert credentials(config) is second


def test_files_of_no_use_do_not_replace_good_ones(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls")
    config = mount.config()
    good = credentials(config)
    mount.issue(expired=True)
    assert credentials(config) is good
    (mount.folder / "..data").rename(mount.folder / "..gone")
    assert credentials(config) is good
    mount.issue()
    renewed = credentials(config)
    assert renewed is not good and renewed is not None
    assert renewed.cert == config.cert.read_bytes()


def test_nothing_is_encrypted_without_files() -> None:
    assert credentials(TlsConfig()) is None


def test_it_is_told_when_the_certificate_that_counts_now_expires(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls")
    registry = CollectorRegistry()
    registry.register(CertificateMetrics(mount.config()))

    def days() -> float:
        found = registry.get_sample_value(TLS_CERTIFICATE_EXPIRES)
        assert found is not None
        return (found - time.time()) / 86400

    assert days() == pytest.approx(1, abs=0.01)
    mount.issue(days=90)
    assert days() == pytest.approx(90, abs=0.01)
    mount.issue("another", days=200)  # no peer would take it
    assert days() == pytest.approx(90, abs=0.01)


def test_without_tls_nothing_is_told_of_certificates() -> None:
    registry = CollectorRegistry()
    registry.register(CertificateMetrics(PLAIN))
    assert registry.get_sample_value(TLS_CERTIFICATE_EXPIRES) is None
