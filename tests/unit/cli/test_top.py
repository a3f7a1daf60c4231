"""`paceline top` against processes that show real registries."""

import asyncio
import io
import re

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from paceline.cli import main as cli
from paceline.cli.top import GATEWAY, ROUTER, WORKER, Look, Process, TopConfig, look, picture
from paceline.core import metrics as names
from paceline.core.errors import ConfigError
from paceline.gateway.metrics import GatewayMetrics
from paceline.router.metrics import RouterMetrics
from paceline.worker.metrics import WorkerMetrics
from tests.unit.cli.scraped import shown


async def test_it_shows_each_process_with_its_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    gateway, router, worker = GatewayMetrics(), RouterMetrics(), WorkerMetrics("m", "decode")
    links = CollectorRegistry()
    names.SERVICE_INFO.gauge(links).labels("decode", "1").set(1)
    names.TRANSFER_LINK_SPEED.gauge(links).labels("prefill-7", "tcp").set(2.5e9)
    degraded = names.LINKS_DEGRADED.gauge(links)
    for source in ("prefill-7", "prefill-8"):
        degraded.labels(source, "tcp").set(0)
    router.queue_length.set(17)
    async with shown(gateway.registry, router.registry, worker.registry, links) as urls:
        gone = "http://127.0.0.1:9"
        arguments = [
            "top",
            f"--urls={','.join([urls[0] + '/metrics', *urls[1:], gone])}",
            "--interval-s=0.4",
            "--looks=1",
        ]
        running = asyncio.create_task(asyncio.to_thread(cli.main, arguments))
        model = gateway.for_model("m")
        while not running.done():  # between the two looks, whenever they are
            model.prompt_tokens.inc(400)
            model.ttft.observe(0.25)
            await asyncio.sleep(0.02)
        assert await running == 0
    text = capsys.readouterr().out
    for title in ("gateways", "routers", "workers", "links", "no answer"):
        assert title in text
    assert "250.0" in text  # mean TTFT in ms of what came since the first look
    assert re.search(r"router +127\S+ +17 ", text)
    assert re.search(r"prefill-7 +127\S+ +tcp +2\.50", text)
    assert re.search(r"prefill-8 +127\S+ +tcp +–", text)
    assert text.rstrip().endswith("127.0.0.1:9")


def test_eighty_columns_hold_every_heading_and_the_longest_address() -> None:
    """Numbers are as wide as their headings at least."""
    url = "http://255.255.255.255:65535"

    def process(service: str) -> Process:
        seen = Look(url, 1.0, {names.SERVICE_INFO: [({"service": service}, 1.0)]})
        return Process(seen, seen)

    processes = [process(service) for service in ("gateway", "router", "prefill", "decode")]
    console = Console(width=80, file=io.StringIO())
    console.print(picture(processes))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and text.count("255.255.255.255:65535") == 4
    words = set(text.split())
    for columns in (GATEWAY, ROUTER, WORKER):
        for name, _ in columns:
            assert words.issuperset(name.split()), name


async def test_a_process_that_shows_no_metrics_is_no_answer() -> None:
    async with shown(CollectorRegistry()) as urls:
        assert (await asyncio.to_thread(look, urls[0])).service == ""


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"urls": ()}, "urls"),
        ({"urls": ("127.0.0.1:9101",)}, "urls"),
        ({"urls": ("http://127.0.0.1:abc",)}, "urls"),
        ({"urls": ("http://[::1",)}, "urls"),
        ({"urls": ("http://h:1",), "interval_s": 0.0}, "interval_s"),
        ({"urls": ("http://h:1",), "looks": -1}, "looks"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TopConfig(**settings)  # type: ignore[arg-type]
