"""`paceline links`, from the metrics of workers."""

import asyncio
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from paceline.cli import main as cli
from paceline.cli.links import EXIT_DEGRADED, LinksConfig
from paceline.core import metrics as names
from paceline.core.errors import ConfigError
from tests.unit.cli.scraped import shown


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    yield


def worker(*, degraded: float, apart: float = 0, quarantined: float = 0) -> CollectorRegistry:
    registry = CollectorRegistry()
    names.SERVICE_INFO.gauge(registry).labels("decode", "1").set(1)
    labels = "prefill-7", "tcp"
    names.TRANSFER_LINK_SPEED.gauge(registry).labels(*labels).set(2.5e9)
    names.LINK_TEST_SPEED.gauge(registry).labels(*labels).set(1.25e9)
    names.LINK_TEST_LATENCY.gauge(registry).labels(*labels).set(180e-6)
    names.LINKS_DEGRADED.gauge(registry).labels(*labels).set(degraded)
    names.PEERS_APART.gauge(registry).set(apart)
    names.PEERS_QUARANTINED.gauge(registry).set(quarantined)
    return registry


@pytest.mark.parametrize(
    ("degraded", "apart", "code", "state"),
    [(0, 0, 0, "ok"), (1, 0, EXIT_DEGRADED, "degraded"), (0, 1, EXIT_DEGRADED, "ok")],
)
async def test_it_shows_each_link_once(
    capsys: pytest.CaptureFixture[str], degraded: float, apart: float, code: int, state: str
) -> None:
    async with shown(worker(degraded=degraded, apart=apart), CollectorRegistry()) as urls:
        arguments = ["links", f"--urls={','.join(urls)}"]
        assert await asyncio.to_thread(cli.main, arguments) == code
    text = capsys.readouterr().out
    assert re.search(rf"prefill-7 +127\S+ +tcp +2\.50 +1\.25 +180 +{state}", text)
    assert ("keeps 1 apart" in text) is bool(apart)


async def test_a_source_in_quarantine_is_told_of_though_it_has_no_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with shown(worker(degraded=0, quarantined=2)) as urls:
        code = await asyncio.to_thread(cli.main, ["links", f"--urls={urls[0]}"])
    assert code == EXIT_DEGRADED
    assert "keeps 2 in quarantine" in capsys.readouterr().out


async def test_a_link_that_was_not_measured_yet_has_no_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = CollectorRegistry()
    names.SERVICE_INFO.gauge(registry).labels("prefill", "1").set(1)
    degraded = names.LINKS_DEGRADED.gauge(registry)
    for source in ("d", "e"):
        degraded.labels(source, "shm").set(0)
    names.TRANSFER_LINK_SPEED.gauge(registry).labels("d", "shm").set(12e9)
    async with shown(registry) as urls:
        assert await asyncio.to_thread(cli.main, ["links", f"--urls={urls[0]}"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"d +127\S+ +shm +12 +– +– +ok", text)
    assert re.search(r"e +127\S+ +shm +– +– +– +ok", text)


async def test_without_a_worker_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async with shown(CollectorRegistry()) as urls:
        assert await asyncio.to_thread(cli.main, ["links", f"--urls={urls[0]}"]) == cli.EXIT_FAILED
    assert "no worker" in capsys.readouterr().err


@pytest.mark.parametrize("urls", [(), ("127.0.0.1:1",), ("http://h:1",) * 300])
def test_wrong_settings_are_refused(urls: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        LinksConfig(urls)
    assert refused.value.field == "urls"
