"""`paceline bench` before a real gateway whose router is scripted, and what it sends."""

import asyncio
import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.cli.roles import python_path
from paceline.core.errors import ConfigError
from paceline.sim.bench import BenchConfig
from paceline.sim.http_stream import Server
from paceline.sim.live import Answered, drive, find_target
from paceline.sim.load import Sessions, arrivals_of
from paceline.sim.main import SimConfig, rows
from paceline.sim.prompts import Prompts
from paceline.sim.slo import Slo
from paceline.sim.trace import Arrival
from paceline.v1.common_pb2 import ERROR_CODE_INTERNAL, ERROR_CODE_OVERLOADED, Error, TokenRequest
from tests.support.fake_router_service import Reply
from tests.support.gateway_deployment import Deployment, running
from tests.support.mock_model import write_mock_model
from tests.support.waits import until

KEY = "a-key-of-the-tests"


def test_prompts_share_what_the_trace_shares_and_depend_on_the_seed_alone() -> None:
    prompts = Prompts(vocab_size=1000, shrink=4)
    longer, shorter = Arrival(0, 1200, 8, (7, 8, 9)), Arrival(0, 1030, 8, (7, 8, 5))
    one, other = (prompts.token_ids(prompts.shrunk(a), 0) for a in (longer, shorter))
    assert (len(one), len(other)) == (300, 257)
    assert one[:256] == other[:256] and one[256] != other[256]
    assert max(one) < 1000 and len(set(one)) > 200
    assert one == Prompts(1000, 4).token_ids(prompts.shrunk(longer), 1)
    assert one != Prompts(1000, 4, seed=1).token_ids(prompts.shrunk(longer), 0)
    assert prompts.shrunk(longer).num_output_tokens == 2


def test_tokens_that_no_hash_id_stands_for_are_shared_with_nobody() -> None:
    one, other = (Prompts(1000).token_ids(Arrival(0, 600, 1, (7,)), i) for i in range(2))
    assert len(one) == 600 and one[:512] == other[:512] and one[512:] != other[512:]


async def test_what_waits_for_a_connection_is_late_from_the_instant_it_was_due(
    tmp_path: Path,
) -> None:
    load = [Arrival(5 + 0.2 * i, 8, 1, (i,)) for i in range(3)]
    async with running(write_mock_model(tmp_path / "m")) as deployment:
        deployment.router.reply = lambda request: Reply([[65]], delay_s=0.5)
        target = await find_target(Server(f"http://127.0.0.1:{deployment.port}"), "", 60)
        got: list[Answered] = []
        prompts = Prompts(256)
        await drive(target, prompts, load, Slo(), time_scale=2.0, max_connections=1, answers=got)
    assert [one.failure for one in got] == [""] * 3
    assert got[0].ttft_s >= 0.5 and got[1].late_s >= 0.4 and got[2].late_s >= 0.8
    assert got[2].ttft_s >= 1.3 > 0.5 + 0.2


async def bench(deployment: Deployment, *arguments: str) -> tuple[int, str, str]:
    url = f"http://127.0.0.1:{deployment.port}"
    command = ("-P", "-m", "paceline.cli.main", "bench", "--url", url, *arguments)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env={"PYTHONPATH": python_path(), "COLUMNS": "80"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests of eight tokens each; the last is too long for the model."""
    lengths = (100, 100, 90, 80, 5000)
    lines = [
        {"timestamp": 40 * i, "input_length": n, "output_length": 8, "hash_ids": [1]}
        for i, n in enumerate(lengths)
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def test_a_trace_is_sent_and_counted(tmp_path: Path, trace: Path) -> None:
    """One request is refused at once, one in the middle of its answer."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (tmp_path / "keys").write_text(f'[tenants.acme]\nkeys = ["{digest}"]\n')
    (tmp_path / "key").write_text(KEY + "\n")

    def reply(request: TokenRequest) -> Reply:
        failure = {90: ([], ERROR_CODE_OVERLOADED), 80: ([[65]], ERROR_CODE_INTERNAL)}
        if failed := failure.get(request.num_prompt_tokens):
            return Reply(failed[0], error=Error(code=failed[1], message="no"))
        return Reply([[65 + i] for i in range(8)], num_cached_tokens=50)

    arguments = ("--trace", str(trace), "--model", "mock", "--api-key-file", str(tmp_path / "key"))
    async with running(write_mock_model(tmp_path / "m"), api_keys=tmp_path / "keys") as deployment:
        deployment.router.reply = reply
        code, shown, err = await bench(deployment, *arguments)
        requests = [submission.request for submission in deployment.router.submissions]
        _, line, _ = await bench(deployment, *arguments, "--json")
        refused = await bench(deployment, *arguments[:4])
    assert (
        code == 0 and "1 of 5 requests skipped: mock takes 256 tokens, the longest has 5008" in err
    )
    assert "4 of 4 sent: 2 done, 0 running, 2 failed" in err
    assert "the first failure: 429: 'no'" in err
    assert max(map(len, shown.splitlines())) <= 80
    rows = dict(re.split(r"  +", row.strip(), maxsplit=1) for row in shown.splitlines())
    assert (rows["requests"], rows["failed"], rows["skipped"]) == ("4", "2", "1")
    assert rows["of them"] == "429: 1, internal: 1"
    assert rows["hit rate"] == "50.0%" and rows["SLO met"] == "50.0%"
    assert rows["TTFT p99"].endswith(" ms") and rows["ITL p50"].endswith(" ms")
    figures = json.loads(line)
    assert figures["failures"] == {"429": 1, "internal": 1} and figures["hit_rate"] == 0.5
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"] and figures["output_tokens_per_s"] > 0
    assert refused[0] == 2 and "api_key_file=''" in refused[2] and "401" in refused[2]
    first, second = requests[:2]
    assert list(first.token_ids) == list(second.token_ids) and len(first.token_ids) == 100
    assert first.sampling.ignore_eos and first.sampling.max_tokens == 8
    assert (first.ttft_ms, first.itl_ms) == (pytest.approx(1010, abs=200), 40)


async def test_ctrl_c_shows_what_was_measured_so_far(tmp_path: Path, trace: Path) -> None:
    async with running(write_mock_model(tmp_path / "m")) as deployment:
        deployment.router.reply = lambda request: Reply(
            [[65]], is_endless=True, delay_s=0.0 if request.num_prompt_tokens < 100 else 60
        )
        waiting = asyncio.create_task(bench(deployment, "--trace", str(trace)))
        await until(lambda: len(deployment.router.submissions) == 4, 60)
        (child,) = psutil.Process().children()
        child.send_signal(signal.SIGINT)
        code, shown, err = await waiting
    assert code == 130 and re.search(r"unfinished +4 ", shown) and "Traceback" not in err


async def test_who_is_not_there_or_not_served_is_named(tmp_path: Path, trace: Path) -> None:
    async with running(write_mock_model(tmp_path / "m")) as deployment:
        code, _, err = await bench(deployment, "--trace", str(trace), "--model", "other")
        assert code == 2 and "model='other': served are: mock" in err
        url = f"http://127.0.0.1:{deployment.port}"
    with pytest.raises(ConfigError, match=f"url='{url}': cannot be reached"):
        await find_target(Server(url), "", 60)


@pytest.mark.parametrize(
    "wrong",
    [{"url": "8000"}, {"shrink": 3}, {"time_scale": 0.0}, {"trace": "/none"}, {"vocab_size": 1}],
)
def test_settings_are_checked(wrong: dict[str, object], trace: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BenchConfig(**({"trace": str(trace)} | wrong))  # type: ignore[arg-type]


def test_sessions_are_a_load_for_both_commands() -> None:
    load = Sessions(sessions=2, turns=2, prefix_tokens=512)
    arrivals = arrivals_of("", load, 3, seed=1)
    assert len(arrivals) == 3 and {arrival.blocks[0] for arrival in arrivals} == {0}
    with pytest.raises(ConfigError, match="trace"):
        BenchConfig(trace="x", synthetic=load)
    (row,) = rows(SimConfig(synthetic=load, workers=1, prefill="0", time_scale=1.0))
    assert row.summary.hit_rate > 0.3
