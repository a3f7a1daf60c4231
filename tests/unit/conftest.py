"""Fixtures that tests of several packages share."""

from pathlib import Path

import pytest

from paceline.core import tls
from tests.support.certificates import Mount


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    """Certificates as Kubernetes mounts them."""
    return Mount(tmp_path / "tls")


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that use files with which no peer will connect."""
    monkeypatch.setattr(tls, "_meet", lambda *ends: None)
