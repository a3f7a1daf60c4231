"""The canary: KV of 32 fixed tokens, in pages at the end of the pool that no request is given.

Each rank computes its own before it is ready. Who pairs with another worker pulls that one's into
its arrival pages, and compares: two workers that mean different things by the same name are kept
apart, whatever their digests say.

    pool │ pages of requests │ own: block 0, 1 of group 0, then of group 1 … │ arrivals │ scratch
"""

import time
from dataclasses import dataclass

import torch

from paceline.core.kv_layout import PAGE_TOKENS, KVLayout
from paceline.engine.batch_state import TABLE_WIDTHS
from paceline.models.base import ForwardBatch, Model, PrefillChunk

NUM_BLOCKS = 2
NUM_TOKENS = NUM_BLOCKS * PAGE_TOKENS
_STRIDE = 7919  # a prime: token ids all over the vocabulary

# Of the length of a layer's keys or values. Kernels and layouts that differ round differently; KV
# of other weights, positions or layers is as far away as it is long.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


def num_canary_pages(layout: KVLayout) -> int:
    """What a pool has beyond the pages of requests."""
    return 2 * NUM_BLOCKS * len(layout.groups) + 1


@dataclass(frozen=True, slots=True)
class Canary:
    """`pools` of all ranks with all their pages, of which the canary's are the last."""

    layout: KVLayout
    pools: tuple[torch.Tensor, ...]

    @property
    def own_pages(self) -> tuple[int, ...]:
        """By page group, then block."""
        first = len(self.pools[0]) - num_canary_pages(self.layout)
        return tuple(range(first, first + NUM_BLOCKS * len(self.layout.groups)))

    @property
    def arrival_pages(self) -> tuple[int, ...]:
        return tuple(page + len(self.own_pages) for page in self.own_pages)

    @property
    def scratch_page(self) -> int:
        """For reads whose bytes nobody wants."""
        return len(self.pools[0]) - 1

    @torch.inference_mode()
    def compute(self, model: Model) -> None:
        """Fills the own pages."""
        model.forward(self._batch(model.vocab_size), self.pools)

    def token_seconds(self, model: Model) -> float:
        """Computes them once more: how long that takes for each token."""
        started_s = time.perf_counter()
        self.compute(model)
        for pool in self.pools:
            pool[self.own_pages[-1]].flatten()[-1].item()  # waits for a device
        return (time.perf_counter() - started_s) / NUM_TOKENS

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.layout.page.dtype]

    @torch.inference_mode()
    def distance(self) -> float:
        """Between what has arrived and what is ours, at the worst of all layers and planes: 0 is
        equal, 1 as far as our own is long. NaN if a NaN has arrived."""
        worst = [torch.zeros((), device=self.pools[0].device)]
        for group in range(len(self.layout.groups)):
            layers = len(self.layout.layers_of(group))
            own, arrived = (
                self._values(pages, group)[:, :layers]
                for pages in (self.own_pages, self.arrival_pages)
            )
            lengths = own.square().sum(dim=(0, 3, 4, 5)).sqrt()
            apart = (own - arrived).square().sum(dim=(0, 3, 4, 5)).sqrt()
            worst.append((apart / lengths.clamp_min(1e-9)).max())
        return float(torch.stack(worst).max())

    def _values(self, pages: tuple[int, ...], group: int) -> torch.Tensor:
        chosen = list(pages[group * NUM_BLOCKS :][:NUM_BLOCKS])
        return torch.cat([pool[chosen].float() for pool in self.pools], dim=3)

    def _batch(self, vocab_size: int) -> ForwardBatch:
        device = self.pools[0].device
        positions = torch.arange(NUM_TOKENS, device=device)
        pages = torch.tensor(self.own_pages, device=device).view(-1, NUM_BLOCKS)
        tables = [table.repeat(TABLE_WIDTHS // NUM_BLOCKS)[None] for table in pages]
        slots = [
            table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
            for table in pages
        ]
        return ForwardBatch(
            token_ids=(positions + 1) * _STRIDE % vocab_size,
            positions=positions,
            slot_mappings=tuple(slots),
            query_start=torch.tensor([0, NUM_TOKENS], device=device),
            context_lens=torch.tensor([NUM_TOKENS], device=device),
            block_tables=tuple(tables),
            logits_rows=torch.tensor([NUM_TOKENS - 1], device=device),
            max_query_len=NUM_TOKENS,
            max_context_len=0,
            prefills=(PrefillChunk(NUM_TOKENS, NUM_TOKENS),),
            wants_last_rows=True,
        )
