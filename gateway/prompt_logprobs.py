"""Log probabilities of a prompt's tokens: parts put in order, and vLLM's shape of them.

    [null, {"1234": {"logprob": -0.5, "rank": 1, "decoded_token": " a"}, …}, …]

The first token of a prompt has none; each other has an entry for itself and for the best ones.
"""

import orjson

from paceline.core.errors import EngineFailure
from paceline.gateway.logprobs import JsonList, TokenBytes, finite
from paceline.v1.common_pb2 import PositionLogprobs, PromptLogprobs


class PartOrder:
    """Of one prompt: an attempt that begins again repeats parts, which are passed over."""

    __slots__ = ("_num_known",)

    def __init__(self) -> None:
        self._num_known = 1  # the first token needs nothing

    def new_of(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """What continues the parts before. Raises EngineFailure when something is missing."""
        num_old = self._num_known - part.first_position
        if num_old < 0:
            raise EngineFailure("log probabilities of the prompt were lost")
        new = part.positions[num_old:]
        if not new:
            return None
        self._num_known += len(new)
        return PromptLogprobs(first_position=self._num_known - len(new), positions=new)


class PromptLogprobsText:
    """Encoded as its parts come."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries = JsonList()
        self._entries.extend([None])

    def add(self, part: PromptLogprobs) -> None:
        self._entries.extend([self._entry(p) for p in part.positions])

    def content(self) -> orjson.Fragment:
        return self._entries.content()

    def _entry(self, position: PositionLogprobs) -> dict[str, dict[str, object]]:
        chosen = position.chosen
        ranked = [(position.rank, chosen), *enumerate(position.top, 1)]
        return {
            str(token.token_id): {
                "logprob": finite(token.logprob),
                "rank": rank,
                "decoded_token": self._token_bytes(token.token_id).decode(errors="replace"),
            }
            for rank, token in reversed(ranked)
        }
