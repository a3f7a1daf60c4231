"""A worker or router that dies costs its clients a short pause, never a token.

Two prefill and two decode workers, two routers. While streams run, one prefill worker's processes
are killed with signal 9, then one decode worker's, then the router that is in use. Every stream
must end, with the tokens of the same request in an undisturbed run; `longest_pause_s` is the
longest wait for a token in any stream, measured at the client (the wait for the first one
included).
"""

import asyncio
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, mock_model
from benchmarks.loadgen import TIMING, Call, send_all
from paceline.cli.cluster import Cluster

SEED = 11
VICTIMS = {"prefill": "prefill-0", "decode": "decode-0", "router": "router"}


@dataclass(frozen=True, slots=True)
class Load:
    """`num_streams` at once, prompts of up to `max_prompt` tokens, `max_tokens` of output each."""

    num_streams: int
    max_prompt: int
    max_tokens: int
    vocab_size: int
    kill_after_s: float  # after the streams were sent


MOCK = Load(num_streams=50, max_prompt=600, max_tokens=120, vocab_size=4096, kill_after_s=0.5)
REAL = Load(num_streams=8, max_prompt=120, max_tokens=48, vocab_size=49152, kill_after_s=2.0)


def calls(model: Path, load: Load) -> list[Call]:
    """Greedy and sampled ones in turn: a retry must not change what is drawn either."""
    chance = random.Random(SEED)
    made = []
    for i in range(load.num_streams):
        length = chance.randint(load.max_prompt // 4, load.max_prompt)
        prompt = [chance.randrange(300, load.vocab_size) for _ in range(length)]
        body = {"model": model.name, "prompt": prompt, "max_tokens": load.max_tokens}
        body |= {"temperature": i % 2, "seed": i, "ignore_eos": True}
        made.append(Call({**body, "stream": True}, headers=TIMING))
    return made


def kill_tree(pid: int) -> None:
    """Signal 9 to a worker's front and to its rank, at the same moment."""
    front = psutil.Process(pid)
    for process in [front, *front.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)


async def run_and_kill(
    cluster: Cluster, sent: list[Call], victim: str, wait_s: float
) -> list[Answer]:
    answers = asyncio.create_task(send_all(cluster.base_url, sent, len(sent)))
    await asyncio.sleep(wait_s)
    pid = cluster.processes[victim].pid
    assert pid is not None
    kill_tree(pid)
    return await answers


def pause_s(answer: Answer) -> float:
    return max(answer.longest_gap_s, answer.ttft_s)


def num_differing(answers: list[Answer], undisturbed: list[Answer]) -> int:
    """Tokens that are not those of the undisturbed run; missing and surplus ones count."""
    differing = 0
    for answer, expected in zip(answers, undisturbed, strict=True):
        ours, theirs = answer.token_ids(), expected.token_ids()
        differing += abs(len(ours) - len(theirs))
        differing += sum(a != b for a, b in zip(ours, theirs, strict=False))
    return differing


def measure_on(model: Path, load: Load) -> dict[str, float]:
    """One undisturbed run, then one for each victim."""
    sent = calls(model, load)
    figures: dict[str, float] = {"failed": 0, "differing": 0, "longest_pause_s": 0.0}
    workers = {"num_threads": 1}
    with deployment(model, prefill=2, decode=2, routers=2, worker=workers) as cluster:
        show(f"{load.num_streams} streams of {model.name}, undisturbed")
        undisturbed = asyncio.run(send_all(cluster.base_url, sent, len(sent)))
        figures["failed_undisturbed"] = sum(not answer.is_complete for answer in undisturbed)
        figures["undisturbed_pause_s"] = round(max(map(pause_s, undisturbed)), 3)
    for role, victim in VICTIMS.items():
        with deployment(model, prefill=2, decode=2, routers=2, worker=workers) as cluster:
            show(f"{load.num_streams} streams, kill -9 of {victim}")
            answers = asyncio.run(run_and_kill(cluster, sent, victim, load.kill_after_s))
        for answer in answers:
            if not answer.is_complete:
                show(f"failed: {answer.status} {answer.error}")
        figures["failed"] += sum(not answer.is_complete for answer in answers)
        figures["differing"] += num_differing(answers, undisturbed)
        figures[f"pause_{role}_s"] = round(max(map(pause_s, answers)), 3)
    figures["longest_pause_s"] = max(figures[f"pause_{role}_s"] for role in VICTIMS)
    return figures


def measure(options: Options) -> dict[str, float]:
    with mock_model(step_s=0.02, token_s=0.00002) as mock:
        figures = measure_on(mock, MOCK)
    show("the real model")
    real = measure_on(demo_model(), REAL)
    return {
        **figures,
        "differing_tokens": real["differing"],
        "failed_real": real["failed"],
        "longest_pause_real_s": real["longest_pause_s"],
    }


def main() -> int:
    return publish("kill_worker", measure)


if __name__ == "__main__":
    sys.exit(main())
