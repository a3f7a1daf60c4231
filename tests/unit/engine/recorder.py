"""A model that notes what it is asked."""

import torch

from paceline.models.base import ForwardBatch
from tests.unit.engine.benches import Bench, bench, mock_model


class Recorder:
    """A model that notes what it is asked and may spoil logits."""

    def __init__(self) -> None:
        self.model = mock_model()
        self.batches: list[ForwardBatch] = []
        self.spoil_position = -1
        for name in ("vocab_size", "context_length", "eos_token_ids", "layout"):
            setattr(self, name, getattr(self.model, name))

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.batches.append(batch)
        logits = self.model.forward(batch, pools)
        spoilt = batch.positions[batch.logits_rows] == self.spoil_position
        return torch.where(spoilt[:, None], float("nan"), logits)


def shapes(batch: ForwardBatch) -> tuple[int, list[int]]:
    """(number of decodes, lengths of chunks)"""
    num_decodes = len(batch.context_lens) - len(batch.prefills)
    return num_decodes, [chunk.query_len for chunk in batch.prefills]


def recorded(**config: int) -> tuple[Bench, Recorder]:
    model = Recorder()
    return bench(model, **config), model
