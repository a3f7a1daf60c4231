"""Mixed requests without end, each of which has one right answer that is known beforehand."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.cancel_storm import is_leaving, leaving_at
from benchmarks.loadgen import TIMING, Call, send
from tests.support.end_to_end import Alone

NUM_TEMPLATES = 40
LONGEST_PROMPT = 1200
COMMON_TOKENS = 200  # that a third of the prompts begin with
LEAVING_SHARE = 0.2
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Template:
    """A request and the tokens of each of its choices."""

    body: Mapping[str, Any]
    expected: list[list[int]]


@dataclass(slots=True)
class Tally:
    """What became of the requests. `unanswered` and `differing` say what went wrong."""

    num_complete: int = 0
    num_left: int = 0
    unanswered: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def count(self, template: Template, call: Call, answer: Answer) -> None:
        if answer.is_complete:
            self.num_complete += 1
        elif answer.has_left and is_leaving(call):
            self.num_left += 1
        else:
            self.unanswered.append(f"{answer.status} {answer.error or 'ended early'}")
        for choice, right in enumerate(template.expected):
            tokens = answer.token_ids(choice)
            if tokens != (right if answer.is_complete else right[: len(tokens)]):
                self.differing.append(f"seed {template.body['seed']}, choice {choice}")


def make_templates(model: Path, twin: Path, vocab_size: int, seed: int) -> list[Template]:
    """`twin`: the same model in a form that does not sleep, for the right answers."""
    chance = random.Random(seed)
    alone = Alone(twin)
    common = [chance.randrange(300, vocab_size) for _ in range(COMMON_TOKENS)]
    made = []
    for i in range(NUM_TEMPLATES):
        own = [chance.randrange(300, vocab_size) for _ in range(chance.randint(1, LONGEST_PROMPT))]
        prompt = common + own if i % 3 == 0 else own
        sampling = {"max_tokens": chance.randint(1, 80), "n": chance.choice((1, 1, 3)), "seed": i}
        sampling |= {"temperature": i % 2, "ignore_eos": True}
        body = {"model": model.name, "prompt": prompt, "stream": True, **sampling}
        made.append(Template(body, alone.answer(prompt, **sampling)))
    return made


async def traffic(
    base_url: str,
    templates: list[Template],
    at_once: int,
    tally: Tally,
    stop: asyncio.Event,
    chance: random.Random,
) -> None:
    """`at_once` clients, one request after the other each, until `stop`; then the last ones end."""

    async def client() -> None:
        while not stop.is_set():
            template = chance.choice(templates)
            leaving = leaving_at(chance) if chance.random() < LEAVING_SHARE else {}
            call = Call(template.body, headers=TIMING, timeout_s=TIMEOUT_S, **leaving)
            tally.count(template, call, await send(base_url, call))

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client())
