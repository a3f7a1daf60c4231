"""Requests that are cancelled at random moments leave nothing behind.

200 requests, 16 at once, every fifth client hangs up before its answer can be over: in the queue,
while its prompt is computed, while its KV travels, in mid-stream. All others must be answered, and
then every page of every worker is free or cached and the router counts nobody.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, mock_model, settle
from benchmarks.loadgen import Call, send_all

NUM_REQUESTS = 200
AT_ONCE = 16
CANCELLED_SHARE = 0.2
STEP_S = 0.01
SEED = 7


def calls(
    model: Path, vocab_size: int, num_requests: int, share: float = CANCELLED_SHARE
) -> list[Call]:
    """Prompts of 1 to 600 tokens, some with a common beginning, and up to 48 tokens of output;
    `share` of the clients leave."""
    chance = random.Random(SEED)
    common = [chance.randrange(300, vocab_size) for _ in range(200)]
    leaving = set(chance.sample(range(num_requests), round(num_requests * share)))
    made = []
    for i in range(num_requests):
        own = [chance.randrange(300, vocab_size) for _ in range(chance.randint(1, 400))]
        prompt = common + own if chance.random() < 0.3 else own
        max_tokens = chance.randint(8, 48)
        body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "n": chance.choice((1, 1, 1, 3)), "seed": i}
        made.append(Call(body, timeout_s=120, **(leaving_at(chance) if i in leaving else {})))
    return made


def leaving_at(chance: random.Random) -> dict[str, Any]:
    """Half of them some time after sending, half with one of the first events."""
    if chance.random() < 0.5:
        return {"leave_after_s": chance.uniform(0, 0.2)}
    return {"leave_after_pieces": chance.randint(1, 6)}


def is_leaving(call: Call) -> bool:
    return call.leave_after_s is not None or call.leave_after_pieces is not None


def outcome(sent: list[Call], answers: list[Answer]) -> dict[str, float]:
    pairs = list(zip(sent, answers, strict=True))
    for call, answer in pairs:
        if not is_leaving(call) and not answer.is_complete:
            show(f"unanswered: {answer.status} {answer.error}")
    return {
        "unanswered": sum(not is_leaving(c) and not a.is_complete for c, a in pairs),
        "cancelled": sum(a.has_left for a in answers),
        "cancelled_in_stream": sum(a.has_left and bool(a.events) for a in answers),
    }


def measure_on(model: Path, vocab_size: int, num_requests: int) -> dict[str, float]:
    sent = calls(model, vocab_size, num_requests)
    with deployment(model, prefill=2, decode=2) as cluster:
        show(f"{num_requests} requests to {model.name}")
        answers = asyncio.run(send_all(cluster.base_url, sent, AT_ONCE))
        left = settle(cluster)
    figures = outcome(sent, answers)
    figures |= {"leaked_blocks": left.pages, "leaked_slots": left.slots}
    return figures | {"still_in_flight": left.in_flight, "unbalanced_pools": left.unbalanced}


def measure(options: Options) -> dict[str, float]:
    """The mock model; the full form runs the demo model too."""
    with mock_model(step_s=STEP_S) as mock:
        figures = measure_on(mock, 4096, NUM_REQUESTS)
    if not options.quick:
        real = measure_on(demo_model(), 49152, NUM_REQUESTS // 4)
        figures |= {f"{key}_real": value for key, value in real.items()}
    return figures


def main() -> int:
    return publish("cancel_storm", measure)


if __name__ == "__main__":
    sys.exit(main())
