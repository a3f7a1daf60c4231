"""The logits processor `allowed_token_ids`: {"token_ids": [3, 17]} lets no other tokens come."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.errors import InvalidRequest
from paceline.engine.logits_processors import ProcessorRow


class AllowedTokenIds:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The mask of those that may not come, [vocab]."""
        ids = arguments.get("token_ids")
        if arguments.keys() != {"token_ids"} or not isinstance(ids, list) or not ids:
            reason = 'takes {"token_ids": [one id or more]}'
            raise InvalidRequest("logits_processors", dict(arguments), reason)
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                reason = f"ids must lie between 0 and {self.vocab_size - 1}"
                raise InvalidRequest("logits_processors", token_id, reason)
        mask = torch.ones(self.vocab_size, dtype=torch.bool)
        mask[ids] = False
        return mask

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        masks = torch.stack([row.prepared for row in rows]).to(logits.device)
        logits.masked_fill_(masks, float("-inf"))
