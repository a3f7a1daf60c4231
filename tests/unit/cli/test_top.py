"""`paceline top` against processes that show real registries."""

import asyncio
import io
import re

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from paceline.cli import main as cli
from paceline.cli.top import (
    GATEWAY,
    ROUTER,
    WORKER,
    Look,
    Process,
    Samples,
    TopConfig,
    look,
    picture,
)
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
    worker.observe_role("both")
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
    assert re.search(r"both +127\S+ +no ", text), "a worker is what it does now"
    assert re.search(r"prefill-7 +127\S+ +tcp +2\.50", text)
    assert re.search(r"prefill-8 +127\S+ +tcp +–", text)
    assert text.rstrip().endswith("127.0.0.1:9")


LARGE = {
    names.GATEWAY_RUNNING: 1024,
    names.PROMPT_TOKENS: 123_456,
    names.PROMPT_TOKENS_CACHED: 123_456,
    f"{names.TTFT}_count": 10,
    f"{names.TTFT}_sum": 12.345,
    f"{names.INTER_TOKEN_LATENCY}_count": 10,
    f"{names.INTER_TOKEN_LATENCY}_sum": 1.2345,
    names.ROUTER_QUEUE_LENGTH: 1024,
    names.ROUTER_INDEX_KEYS: 1_234_567,
    names.VLLM_KV_USAGE: 1,
    names.VLLM_WAITING: 1024,
    names.WORKER_GENERATED: 25_690,
    names.TRANSFER_BYTES: 181_000_000_000,
}


def drawn(width: int, address: str, figures: dict[str, float]) -> str:
    def process(service: str) -> Process:
        info: Samples = {names.SERVICE_INFO: [({"service": service}, 1.0)]}
        now = {name: [({}, float(value))] for name, value in figures.items()}
        before = {name: [({}, 0.0)] for name in figures}
        url = f"http://{address}"
        return Process(Look(url, 1.0, info | now), Look(url, 0.0, info | before))

    silent = Look("http://127.0.0.1:9", 1.0, {})
    processes = [process(service) for service in ("gateway", "router", "prefill", "decode")]
    console = Console(width=width, file=io.StringIO())
    console.print(picture([*processes, Process(silent, silent)]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("figures", [{}, LARGE], ids=["idle", "large"])
@pytest.mark.parametrize("address", ["255.255.255.255:65535", "decode-0.workers.prod.svc:8002"])
@pytest.mark.parametrize("width", [80, 60])
def test_narrow_terminals_hold_every_heading_address_and_figure(
    width: int, address: str, figures: dict[str, float]
) -> None:
    text = drawn(width, address, figures)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and text.count(address) == 4
    words = set(text.split())
    for columns in (GATEWAY, ROUTER, WORKER):
        for name, _ in columns:
            assert words.issuperset(name.split()), name
    if figures:
        assert words >= {"1024", "123456", "1234.5", "123.5", "1234567", "25690", "181000.0"}


def test_names_stand_above_their_figures_only_where_both_do_not_fit() -> None:
    address = "127.0.0.1:65535"
    assert re.search(rf"^prefill {address} +no ", drawn(80, address, {}), re.MULTILINE)
    assert re.search(rf"^prefill {address}\n +no ", drawn(60, address, {}), re.MULTILINE)


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
