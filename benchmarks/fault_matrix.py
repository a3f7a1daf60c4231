"""Each process fails in each way while requests arrive at 0.8 of what the deployment can serve.

Two routers, two prefill and two decode workers, mock model. A cell of the matrix sends requests at
random moments, does its fault after a quarter of them, and compares every answer with that of an
undisturbed run. `pause` is the longest wait for a token in a stream, the first one's included; what
is shown of a cell tells those waits, `ttft`, from others, `gap`.

failed, wrong_tokens, leaked_blocks   sums over all cells; who is refused under overload (429, 503)
                                      has not failed
pause_p99_s_ROLE                      of the streams of the cell that kills one of that role
overload_refused                      of those, how many
overload_refused_p50_ms, _p99_ms      after so long; the client is on the same machine
overload_goodput_of_peak              answers a second at ten times the load, of the peak
overload_normal_after_s               until a request takes no longer than before, when it is over
--only PART                           one cell alone, "kill decode-0" for example
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import deployment, mock_model, settle
from benchmarks.kill_worker import kill_tree, num_differing, pause_s
from benchmarks.loadgen import TIMING, Call, send, send_all
from paceline.cli.cluster import Cluster
from tests.support.soak_faults import recover

STEP_S = 0.05
OUTPUT_TOKENS = 16
MAX_RUNNING = 8  # a decode worker, so that steps and not this machine's cores are the limit
LOAD = 0.8
OVERLOAD = 10
NUM_TEMPLATES = 40
VOCAB_SIZE = 4096
REFUSED = (429, 503)
NORMAL_WITHIN_S = 30.0
SEED = 5


@dataclass(frozen=True, slots=True)
class Scale:
    num_requests: int  # a cell
    stop_s: float  # that a process is stopped for
    overload_s: float


FULL = Scale(num_requests=2000, stop_s=30.0, overload_s=60.0)
QUICK = Scale(num_requests=200, stop_s=6.0, overload_s=8.0)

Fault = Callable[[Cluster, Scale], None]


def kill(name: str) -> Fault:
    return lambda cluster, _: kill_tree(cluster.processes[name].pid)


def stop(name: str) -> Fault:
    def stop_for_long(cluster: Cluster, scale: Scale) -> None:
        cluster.kill(name, signal.SIGSTOP)
        time.sleep(scale.stop_s)
        cluster.kill(name, signal.SIGCONT)

    return stop_for_long


def restart_all(cluster: Cluster, _: Scale) -> None:
    """One after the other: each drains, ends, is started again and ready before the next."""
    for name in [name for name in cluster.processes if name.startswith(("prefill", "decode"))]:
        restart(cluster, name)
    for name in [name for name in cluster.processes if name.startswith("router")]:
        restart(cluster, name)


def restart(cluster: Cluster, name: str) -> None:
    process = cluster.processes[name].process
    cluster.kill(name, signal.SIGTERM)
    process.wait(60)
    recover(cluster)


VICTIMS = ("router", "prefill-0", "decode-0", "redis")
CELLS: dict[str, Fault] = {
    **{f"kill {name}": kill(name) for name in VICTIMS},
    **{f"stop {name}": stop(name) for name in VICTIMS},
    "restart workers and routers": restart_all,
}
OVERLOADED = "overload"


def templates(model: Path) -> list[Call]:
    """Greedy and sampled ones in turn."""
    chance = random.Random(SEED)
    made = []
    for i in range(NUM_TEMPLATES):
        prompt = [chance.randrange(300, VOCAB_SIZE) for _ in range(chance.randint(40, 400))]
        body = {"model": model.name, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "seed": i}
        body |= {"temperature": i % 2, "ignore_eos": True, "stream": True}
        made.append(Call(body, headers=TIMING, timeout_s=120))
    return made


async def at_rate(base_url: str, sent: list[Call], per_s: float) -> list[Answer]:
    """At random moments, whatever became of those before."""
    chance = random.Random(SEED)
    tasks = []
    for call in sent:
        tasks.append(asyncio.create_task(send(base_url, call)))
        await asyncio.sleep(chance.expovariate(per_s))
    return list(await asyncio.gather(*tasks))


@dataclass(slots=True)
class Matrix:
    cluster: Cluster
    scale: Scale
    calls: list[Call]
    expected: list[Answer]
    peak_per_s: float

    def picks(self, num_requests: int) -> list[int]:
        chance = random.Random(SEED)
        return [chance.randrange(NUM_TEMPLATES) for _ in range(num_requests)]

    async def disturbed(self, picks: list[int], fault: Fault) -> list[Answer]:
        per_s = LOAD * self.peak_per_s
        sent = [self.calls[pick] for pick in picks]
        answers = asyncio.create_task(at_rate(self.cluster.base_url, sent, per_s))
        await asyncio.sleep(len(picks) / per_s / 4)
        await asyncio.to_thread(fault, self.cluster, self.scale)
        return await answers

    def cell(self, name: str, fault: Fault) -> dict[str, float]:
        picks = self.picks(self.scale.num_requests)
        answers = asyncio.run(self.disturbed(picks, fault))
        found = self.judge(picks, answers)
        recover(self.cluster)
        found["leaked_blocks"] = settle(self.cluster).pages
        show(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in found.items()))
        return found

    def judge(self, picks: list[int], answers: list[Answer]) -> dict[str, float]:
        for answer in answers:
            if not answer.is_complete:
                show(f"failed: {answer.status} {answer.error}")
        return {
            "failed": sum(not answer.is_complete for answer in answers),
            "wrong_tokens": num_differing(answers, [self.expected[pick] for pick in picks]),
            "pause_p99_s": p99(map(pause_s, answers)),
            "ttft_p99_s": p99(answer.ttft_s for answer in answers),
            "gap_p99_s": p99(answer.longest_gap_s for answer in answers),
        }

    def overload(self) -> dict[str, float]:
        picks = self.picks(round(OVERLOAD * self.peak_per_s * self.scale.overload_s))
        sent = [self.calls[pick] for pick in picks]
        usual_s = self.one_s()
        began = time.monotonic()
        answers = asyncio.run(at_rate(self.cluster.base_url, sent, OVERLOAD * self.peak_per_s))
        took_s = time.monotonic() - began
        normal_s = self.until_normal(2 * usual_s)
        served = [pair for pair in zip(picks, answers, strict=True) if not is_refused(pair[1])]
        found = self.judge([pick for pick, _ in served], [answer for _, answer in served])
        found["leaked_blocks"] = settle(self.cluster).pages
        found["refused"] = len(answers) - len(served)
        found |= refusal_ms([answer for answer in answers if is_refused(answer)])
        found["goodput"] = (len(served) - found["failed"]) / took_s
        found["normal_after_s"] = normal_s
        show("overload: " + ", ".join(f"{key} {value:g}" for key, value in found.items()))
        return found

    def one_s(self) -> float:
        began = time.monotonic()
        (answer,) = asyncio.run(send_all(self.cluster.base_url, self.calls[:1], 1))
        return time.monotonic() - began if answer.is_complete else float("inf")

    def until_normal(self, limit_s: float) -> float:
        began = time.monotonic()
        while self.one_s() > limit_s and time.monotonic() - began < NORMAL_WITHIN_S:
            pass
        return time.monotonic() - began


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) * 99 // 100]


def is_refused(answer: Answer) -> bool:
    return answer.status in REFUSED


def refusal_ms(refused: list[Answer]) -> dict[str, float]:
    """How long refusals took."""
    times = sorted(1000 * (a.events[0].at_s - a.sent_s) for a in refused if a.events) or [0.0]
    return {f"refused_p{q}_ms": times[len(times) * q // 100] for q in (50, 99)}


def peak(cluster: Cluster, calls: list[Call]) -> float:
    """Answers a second of a closed loop that keeps every place taken."""
    sent = calls * 4
    began = time.monotonic()
    asyncio.run(send_all(cluster.base_url, sent, 4 * MAX_RUNNING))
    return len(sent) / (time.monotonic() - began)


def measure(options: Options) -> dict[str, float]:
    scale = QUICK if options.quick else FULL
    worker = {"max_running": MAX_RUNNING, "num_threads": 1}
    with (
        mock_model(VOCAB_SIZE, step_s=STEP_S) as model,
        deployment(model, prefill=2, decode=2, routers=2, worker=worker) as cluster,
    ):
        calls = templates(model)
        expected = asyncio.run(send_all(cluster.base_url, calls, MAX_RUNNING))
        peak_per_s = peak(cluster, calls)
        show(f"peak {peak_per_s:.1f} a second")
        matrix = Matrix(cluster, scale, calls, expected, peak_per_s)
        cells = {name: fault for name, fault in CELLS.items() if options.only in ("", name)}
        found = {name: matrix.cell(name, fault) for name, fault in cells.items()}
        if options.only not in CELLS:
            found[OVERLOADED] = matrix.overload()
    return figures(found, peak_per_s)


def figures(found: dict[str, dict[str, float]], peak_per_s: float) -> dict[str, float]:
    sums = {
        k: sum(c[k] for c in found.values()) for k in ("failed", "wrong_tokens", "leaked_blocks")
    }
    pauses = {
        f"pause_p99_s_{name.partition('-')[0]}": found[cell]["pause_p99_s"]
        for name in VICTIMS
        if (cell := f"kill {name}") in found
    }
    shown = {**sums, **pauses}
    if overload := found.get(OVERLOADED):
        shown |= {
            "overload_refused": overload["refused"],
            "overload_refused_p50_ms": overload["refused_p50_ms"],
            "overload_refused_p99_ms": overload["refused_p99_ms"],
            "overload_goodput_of_peak": overload["goodput"] / peak_per_s,
            "overload_normal_after_s": overload["normal_after_s"],
        }
    return shown


def main() -> int:
    return publish("fault_matrix", measure, parts=(*CELLS, OVERLOADED))


if __name__ == "__main__":
    sys.exit(main())
