"""How much of a conversation is computed again, over two prefill and two decode workers.

Eight conversations at once: a start of 512 tokens, then ten turns of 64 tokens in and 64 out. A
perfect cache computes of each turn only what is new in it: all that stood before the turn, the last
answer too but for its last token, has KV somewhere. The mock model takes a millisecond for a token
of a prompt, as the demo model does on two cores: what costs nothing to compute is not pulled.

recomputed_fraction   tokens with KV somewhere that were computed again, of all of those
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.common import Options, publish, show
from benchmarks.deployment import deployment, mock_model, workers_total
from benchmarks.loadgen import TIMING, Call, send
from paceline.core import metrics as names
from paceline.worker.pull_choice import Outcome

NUM_CONVERSATIONS = 8
NUM_QUICK = 2
START_TOKENS = 512
TURN_TOKENS = 64
NUM_TURNS = 10
PAUSE_S = 1.0  # a reader's: by then the index knows what the turn before has left
TOKEN_S = 0.001
VOCAB_SIZE = 4096
SEED = 3


@dataclass(slots=True)
class Reuse:
    """In tokens, over turns."""

    known: int = 0  # had KV somewhere
    cached: int = 0  # were not computed again

    def add(self, known: int, cached: int) -> None:
        self.known += known
        self.cached += min(cached, known)


async def turn(base_url: str, model: Path, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt came from a cache."""
    body = {"model": model.name, "prompt": prompt, "max_tokens": TURN_TOKENS, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await send(base_url, Call(body, headers=TIMING))
    if not answer.is_complete or answer.usage is None:
        raise RuntimeError(f"a turn failed: {answer.status} {answer.error}")
    return answer.token_ids(), answer.usage["prompt_tokens_details"]["cached_tokens"]


async def converse(base_url: str, model: Path, seed: int, reuse: Reuse) -> None:
    chance = Random(seed)

    def said(num_tokens: int) -> list[int]:
        return [chance.randrange(300, VOCAB_SIZE) for _ in range(num_tokens)]

    text, num_known = said(START_TOKENS), 0
    for _ in range(NUM_TURNS):
        text += said(TURN_TOKENS)
        answer, num_cached = await turn(base_url, model, text)
        reuse.add(num_known, num_cached)
        text += answer
        num_known = len(text) - 1
        await asyncio.sleep(PAUSE_S)


async def converse_all(base_url: str, model: Path, num_conversations: int) -> Reuse:
    reuse = Reuse()
    seeds = range(SEED, SEED + num_conversations)
    await asyncio.gather(*(converse(base_url, model, seed, reuse) for seed in seeds))
    return reuse


def measure(options: Options) -> dict[str, float]:
    num_conversations = NUM_QUICK if options.quick else NUM_CONVERSATIONS
    with (
        mock_model(VOCAB_SIZE, token_s=TOKEN_S) as model,
        deployment(model, prefill=2, decode=2) as cluster,
    ):
        show(f"{num_conversations} conversations of {NUM_TURNS} turns")
        reuse = asyncio.run(converse_all(cluster.base_url, model, num_conversations))
        for result in Outcome:
            num_tokens = workers_total(cluster, names.PREFIX_TOKENS, result=result.value)
            show(f"  {num_tokens:6.0f} tokens that another worker held: {result.value}")
    return {"recomputed_fraction": 1 - reuse.cached / reuse.known, "known_tokens": reuse.known}


def main() -> int:
    return publish("multi_turn", measure)


if __name__ == "__main__":
    sys.exit(main())
