import subprocess
import sys

import pytest

from paceline.core.errors import ConfigError, IncompatiblePeer
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import TransportSettings
from tests.contract.pools import SMALL, make_pool

SETTINGS = TransportSettings("incarnation-1")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'ucx'.*local, shm, tcp, auto"):
        registry.make_source("ucx", make_pool(SMALL, 1), SETTINGS)
    with pytest.raises(ConfigError, match="local, shm, tcp, auto"):
        registry.source_names("ucx")
    with pytest.raises(ConfigError, match="local, shm, tcp, auto"):
        registry.choose("ucx", {"tcp": b""})


def test_a_transport_is_imported_when_it_is_first_used() -> None:
    program = (
        "import sys\nfrom paceline.kv_transfer import registry\n"
        "assert 'paceline.kv_transfer.tcp' not in sys.modules\n"
        "registry.load('tcp')\n"
        "assert 'paceline.kv_transfer.shm' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_transport_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modules", dict(registry._modules))
    registry.register("rocket", "paceline.kv_transfer.rocket")
    assert registry.known_transports()[-1] == "rocket"
    with pytest.raises(ConfigError, match=r"rocket.*No module named"):
        registry.load("rocket")


def test_auto_takes_the_best_that_both_have() -> None:
    pool = make_pool(SMALL, 1)
    sources = {
        name: registry.make_source(name, pool, SETTINGS) for name in registry.source_names("auto")
    }
    for source in sources.values():
        source.start()
    offered = {name: source.address() for name, source in sources.items()}
    try:
        choice = registry.choose("auto", offered)
        assert choice.name == "shm"
        assert choice.address == offered["shm"]
        assert choice.passed_over == ("local: the source offers only shm, tcp",)
        without_shm = registry.choose("auto", {"tcp": offered["tcp"]})
        assert without_shm.name == "tcp"
        assert "shm: the source offers only tcp" in without_shm.passed_over
        assert registry.choose("tcp", offered).name == "tcp"
        sources["shm"].close()
        fallback = registry.choose("auto", offered)
        assert fallback.name == "tcp"
        assert "shm: its socket does not answer: Connection refused" in fallback.passed_over
    finally:
        for source in sources.values():
            source.close()


def test_no_common_transport_gives_each_reason() -> None:
    with pytest.raises(IncompatiblePeer, match="shm: the source offers only rocket") as caught:
        registry.choose("auto", {"rocket": b""})
    assert "tcp: the source offers only rocket" in caught.value.message
    assert caught.value.field == "transport"


def test_auto_passes_over_addresses_that_cannot_be_read() -> None:
    with pytest.raises(IncompatiblePeer, match="tcp: address cannot be read"):
        registry.choose("auto", {"shm": b"\x80\x04junk", "tcp": b"junk"})


def test_local_reaches_this_process_only() -> None:
    pool = make_pool(SMALL, 1)
    source = registry.make_source("local", pool, SETTINGS)
    source.start()
    assert registry.choose("auto", {"local": source.address()}).name == "local"
    source.close()
    with pytest.raises(IncompatiblePeer, match="local: the source lives in another process"):
        registry.choose("auto", {"local": source.address()})
