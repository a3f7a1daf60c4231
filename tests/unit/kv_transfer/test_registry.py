import subprocess
import sys

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import DevicePool, TransportSettings
from tests.contract.pools import SMALL, make_pool

SETTINGS = TransportSettings("incarnation-1")


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = "local, cuda_ipc, shm, nixl, ucx, tcp, multi, auto"
    with pytest.raises(ConfigError, match=f"'mooncake'.*{known}"):
        registry.make_source("mooncake", make_pool(SMALL, 1), SETTINGS)
    with pytest.raises(ConfigError, match=known):
        registry.names_of(("mooncake",))


def test_a_transport_is_imported_when_it_is_first_used() -> None:
    program = (
        "import sys\nfrom paceline.kv_transfer import registry\n"
        "assert 'paceline.kv_transfer.tcp' not in sys.modules\n"
        "registry.load('tcp')\n"
        "assert 'paceline.kv_transfer.shm' not in sys.modules\n"
        "registry.load('cuda_ipc')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_transport_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry.register("rocket", "paceline.kv_transfer.rocket")
    assert registry.names_of(("auto",))[-1] == "rocket"
    with pytest.raises(ConfigError, match=r"rocket.*No module named"):
        registry.load("rocket")


@pytest.mark.parametrize("name", ["ucx", "nixl"])
def test_an_extra_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"not installed: pip install 'paceline\[{name}\]'"):
        registry.names_of((name,))


@pytest.mark.parametrize("choice", ["auto", "multi"])
def test_auto_means_what_fits_the_pool_and_is_of_use_best_first(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "has_rdma_device", lambda: False)
    assert registry.names_of((choice,)) == ["shm", "tcp"]
    assert registry.names_of((choice,), on_device=True) == ["cuda_ipc"]
    assert registry.names_of(("tcp", choice, "local")) == ["tcp", "shm", "local"]


def test_auto_takes_installed_libraries_where_there_is_rdma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "has_rdma_device", lambda: True)
    monkeypatch.setattr(registry, "find_spec", lambda package: package == "ucxx" or None)
    assert registry.names_of(("auto",)) == ["shm", "ucx", "tcp"]


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_a_pool_on_a_device_is_not_for_transports_of_the_host(name: str) -> None:
    pool = DevicePool(torch.zeros(SMALL.page_bytes, dtype=torch.uint8), SMALL, 1)
    for make in (registry.make_source, registry.make_reader):
        with pytest.raises(ConfigError, match=f"'{name}': needs a pool in host memory"):
            make(name, pool, SETTINGS)


def test_a_pool_that_is_not_on_a_device_is_not_for_cuda_ipc() -> None:
    for make in (registry.make_source, registry.make_reader):
        with pytest.raises(ConfigError, match="'cuda_ipc': needs a pool on a CUDA device"):
            make("cuda_ipc", make_pool(SMALL, 1), SETTINGS)
    torchs_own = DevicePool(torch.zeros(SMALL.page_bytes, dtype=torch.uint8), SMALL, 1)
    with pytest.raises(ConfigError, match="memory that the driver exports"):
        registry.make_source("cuda_ipc", torchs_own, SETTINGS)


def test_what_cannot_be_reached_says_why() -> None:
    pool = make_pool(SMALL, 1)
    sources = {name: registry.make_source(name, pool, SETTINGS) for name in ("local", "shm", "tcp")}
    for source in sources.values():
        source.start()
    offered = {name: source.address() for name, source in sources.items()}
    try:
        assert not any(registry.why_not(name, offered) for name in offered)
        only_tcp = {"tcp": offered["tcp"]}
        assert registry.why_not("shm", only_tcp) == "the source offers only tcp"
        assert registry.why_not("shm", {}) == "the source offers only none"
        for source in sources.values():
            source.close()
        refused = "its socket does not answer: Connection refused"
        assert registry.why_not("shm", offered) == refused
        assert registry.why_not("local", offered) == "the source lives in another process"
        assert "cannot be read" in registry.why_not("tcp", {"tcp": b"junk"})
        assert "cannot be read" in registry.why_not("shm", {"shm": b"\x80\x04junk"})
    finally:
        for source in sources.values():
            source.close()
