"""Real token ids for the requests of a load: where a trace says that a prefix is shared, it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.sim.trace import BLOCK_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class Prompts:
    """Each hash id is the same tokens wherever it stands. Lengths are divided by `shrink`, which
    divides BLOCK_TOKENS: what is shared stays the same share."""

    vocab_size: int
    shrink: int = 1
    seed: int = 0

    def shrunk(self, arrival: Arrival) -> Arrival:
        lengths = arrival.num_prompt_tokens, arrival.num_output_tokens
        num_prompt, num_output = (max(1, length // self.shrink) for length in lengths)
        return replace(arrival, num_prompt_tokens=num_prompt, num_output_tokens=num_output)

    def token_ids(self, shrunk: Arrival, number: int) -> list[int]:
        """`number`: of the request; what no hash id stands for is its own."""
        found: list[int] = []
        for block in shrunk.blocks[: -(-shrunk.num_prompt_tokens * self.shrink // BLOCK_TOKENS)]:
            found += self._tokens((0, block % (1 << 63)), BLOCK_TOKENS // self.shrink)
        missing = shrunk.num_prompt_tokens - len(found)
        return (found + self._tokens((1, number), max(0, missing)))[: shrunk.num_prompt_tokens]

    def _tokens(self, of: Sequence[int], count: int) -> list[int]:
        chance = np.random.default_rng([self.seed, *of])
        found: list[int] = chance.integers(self.vocab_size, size=count).tolist()
        return found
