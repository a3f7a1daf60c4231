"""Loads: traces in the Mooncake format, and synthetic sessions under one shared prefix."""

import json
import lzma
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.keys import HASH_BLOCK_TOKENS

BLOCK_TOKENS = 512  # of a trace's hash id
MAX_TOKENS = 1 << 20  # of a prompt or an output: what is longer is no request
HASH_BLOCKS = BLOCK_TOKENS // HASH_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load. `blocks`: an id for each 512 tokens of its prompt, in order."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]
    session: int = -1

    @property
    def num_whole_blocks(self) -> int:
        """Those that can be shared."""
        return min(len(self.blocks), self.num_prompt_tokens // BLOCK_TOKENS)


def read_mooncake(path: Path, num_requests: int | None = None) -> list[Arrival]:
    """The first requests of a file, .xz or plain. Raises ConfigError at a line that is none."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        return parse_mooncake(lines, num_requests)


def parse_mooncake(lines: Iterable[str], num_requests: int | None = None) -> list[Arrival]:
    arrivals = []
    for number, line in enumerate(lines):
        if num_requests is not None and number >= num_requests:
            break
        try:
            raw = json.loads(line)
            tokens = int(raw["input_length"]), int(raw["output_length"])
            arrival = Arrival(
                float(raw["timestamp"]) / 1000, *tokens, tuple(map(int, raw["hash_ids"]))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("trace", f"line {number + 1}", f"is no request: {error}") from None
        fits = all(0 < count <= MAX_TOKENS for count in tokens) and arrival.at_s >= 0
        where = f"line {number + 1}"
        ConfigError.check("trace", where, fits, "holds a length or time without use")
        arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def spread_evenly(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Those of one instant over the time until the next one, in order: traces with coarse clocks.
    The last ones stay as they are."""
    found: list[Arrival] = []
    groups = [list(group) for _, group in groupby(arrivals, key=lambda arrival: arrival.at_s)]
    for group, following in pairwise([*groups, *groups[-1:]]):
        apart_s = (following[0].at_s - group[0].at_s) / len(group)
        found += [replace(a, at_s=a.at_s + i * apart_s) for i, a in enumerate(group)]
    return found


def shared_prefix_sessions(
    num_sessions: int,
    num_turns: int,
    *,
    prefix_tokens: int,
    turn_tokens: int,
    output_tokens: int,
    pause_s: float,
    seed: int,
) -> list[Arrival]:
    """Sessions that all begin with one prefix; a turn brings what came before, and more."""
    chance = random.Random(seed)
    prefix = list(range(prefix_tokens // BLOCK_TOKENS))
    next_block = len(prefix)
    arrivals = []
    for session in range(num_sessions):
        blocks, at_s = list(prefix), chance.uniform(0, 2 * pause_s)
        for _ in range(num_turns):
            num_new = turn_tokens // BLOCK_TOKENS
            blocks.extend(range(next_block, next_block + num_new))
            next_block += num_new
            length = BLOCK_TOKENS * len(blocks)
            arrivals.append(Arrival(at_s, length, output_tokens, tuple(blocks), session))
            at_s += chance.expovariate(1 / pause_s)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)
