"""The logits processor `allowed_token_ids`: {"token_ids": [3, 17]} lets no other tokens come."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidRequest
from paceline.engine.logits_processors import ProcessorRow
from paceline.kernels.rows import fill, put_numbers, take_numbers
from paceline.kernels.transfer import to_device


class AllowedTokenIds:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self, arguments: Mapping[str, Any]) -> NDArray[np.int64]:
        """Distinct ids."""
        ids = arguments.get("token_ids")
        if arguments.keys() != {"token_ids"} or not isinstance(ids, list) or not ids:
            reason = 'takes {"token_ids": [one id or more]}'
            raise InvalidRequest("logits_processors", dict(arguments), reason)
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                reason = f"ids must lie between 0 and {self.vocab_size - 1}"
                raise InvalidRequest("logits_processors", token_id, reason)
        return np.array(sorted(set(ids)), np.int64)

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        """All ids of all rows at once, as indices into the flat logits."""
        ids = np.concatenate([row.prepared for row in rows])
        lengths = [len(row.prepared) for row in rows]
        firsts = np.repeat(np.arange(len(rows)) * self.vocab_size, lengths)
        (places,), flat = to_device(logits.device, firsts + ids), logits.view(-1)
        kept = take_numbers(flat, places)
        fill(logits, float("-inf"))
        put_numbers(flat, places, kept)
