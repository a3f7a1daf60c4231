"""What no router can beat: each prompt on an idle worker that holds all that came before it."""

from collections.abc import Sequence

from paceline.sim.profile import Profile
from paceline.sim.trace import BLOCK_TOKENS, Arrival


def idle_ttfts(profile: Profile, arrivals: Sequence[Arrival]) -> list[float]:
    """Seconds until each first token, without noise. At least one token is computed."""
    seen: set[int] = set()
    found = []
    for arrival in arrivals:
        num_held = num_leading(arrival.blocks[: arrival.num_whole_blocks], seen)
        num_held -= num_held * BLOCK_TOKENS >= arrival.num_prompt_tokens
        found.append(profile.prompt_s(arrival.num_prompt_tokens, num_held * BLOCK_TOKENS))
        seen.update(arrival.blocks[: arrival.num_whole_blocks])
    return found


def num_leading(blocks: Sequence[int], seen: set[int]) -> int:
    """How many of the first blocks were seen; a block's id stands for all before it, too."""
    return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
