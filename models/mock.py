"""A model without weights whose next token is a hash of the KV bytes that it reads.

    cell(token, position, layer, plane, head, dim) = 8 hashed bits, exact in every KV format
    signature(position) = Σ 8-byte word of its KV · odd weight of the word     mod 2^64
    hash(context)       = Σ mix(signature(position), position)                 mod 2^64

A wrong byte, a missing block or a wrong order changes the hash, hence the token. How the prompt was
cut into chunks does not. A layer with a window is part of the signatures of the last positions
only: of as many as the window has. A hidden state is the hash in parts of 16 bits, and the length
of the context, all exact in float32. Logits are uniform in [0, 8); the favourite has 10.

With `num_ranks` its heads lie in as many pools, as those of tensor-parallel ranks would, and
`group_size` says how many layers share a page: other layouts of the same KV, for unequal pairs.
"""

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import PAGE_TOKENS, HeadRange, layout_of
from paceline.models.base import ForwardBatch
from paceline.models.config import served_context
from paceline.models.fields import Fields
from paceline.models.registry import ModelSource

_ROWS_AT_ONCE = 16
_HASH_SHIFTS = (0, 16, 32, 48)  # of its parts in a hidden state
_NEVER = -10_000.0


@dataclass(frozen=True, slots=True)
class MockConfig:
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    step_s: float  # slept in every forward
    token_s: float  # slept for every prefill token
    eos_every: int  # the favourite is eos wherever the context length divides by this; 0: never
    layer_windows: tuple[int, ...]  # of each layer; 0: it sees all


def read_config(fields: Fields) -> MockConfig:
    num_layers = fields.integer("num_hidden_layers")
    return MockConfig(
        vocab_size=fields.integer("vocab_size"),
        num_hidden_layers=num_layers,
        num_key_value_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        step_s=fields.number("step_s", 0.0),
        token_s=fields.number("token_s", 0.0),
        eos_every=fields.integer("eos_every", 0, minimum=0),
        layer_windows=read_windows(fields, num_layers),
    )


def read_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    windows = fields.get("layer_windows", [0] * num_layers)
    if not (isinstance(windows, list) and len(windows) == num_layers and min(windows) >= 0):
        reason = f"must have a window, or 0, for each of {num_layers} layers"
        raise fields.error("layer_windows", windows, reason)
    return tuple(windows)


class MockModel:
    """Drives integration, fault and simulation tests; see the module."""

    numerics_version: ClassVar[int] = 1
    fuses_decodes = False

    def __init__(self, config: MockConfig, source: ModelSource) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = len(_HASH_SHIFTS) + 1
        longest = config.max_position_embeddings
        self.context_length = served_context(longest, longest, source.max_context_length)
        self.eos_token_ids = source.eos_token_ids
        if config.head_dim * source.dtype.itemsize % 8:
            raise ConfigError("head_dim", config.head_dim, "must make a multiple of 8 bytes")
        name = str(source.dtype).removeprefix("torch.")
        heads = (config.num_key_value_heads, config.head_dim)
        self.layout = layout_of(
            config.layer_windows,
            *heads,
            name,
            num_ranks=source.fields.integer("num_ranks", 1),
            group_size=source.fields.integer("group_size", 0, minimum=0),
        )
        page = self.layout.page
        self._shape = (config.num_hidden_layers, page.num_planes, *heads)
        num_cells = math.prod(self._shape)
        self._cells = torch.arange(num_cells, device=source.device)
        num_words = num_cells * page.element_bytes // 8
        weights = mix(torch.arange(num_words, device=source.device)) | 1
        weights = weights.view(*self._shape[:3], 1, -1)
        self._layers = [  # of each page group
            torch.tensor(self.layout.layers_of(i), device=source.device)
            for i in range(len(self.layout.groups))
        ]
        self._weights = [weights[layers] for layers in self._layers]
        self._vocabulary = mix(torch.arange(config.vocab_size, device=source.device))
        within = [token for token in source.eos_token_ids if token < config.vocab_size]
        self._eos = torch.tensor(within, dtype=torch.int64, device=source.device)
        self._shifts = torch.tensor(_HASH_SHIFTS, device=source.device)  # a graph copies nothing in

    @classmethod
    def load(cls, source: ModelSource) -> tuple["MockModel", object]:
        config = read_config(source.fields)
        return cls(config, source), config

    def weight_bytes(self) -> int:
        return sum(weights.nbytes for weights in self._weights) + self._vocabulary.nbytes

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.logits(self.hidden_states(batch, pools))

    def hidden_states(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self._sleep(batch)
        for rank, pool in zip(self.layout.ranks, pools, strict=True):
            self._write(batch, pool, rank)
        sequences = torch.searchsorted(batch.query_start, batch.logits_rows, right=True) - 1
        contexts = batch.positions[batch.logits_rows] + 1
        longest = max([batch.max_context_len, *(chunk.context_len for chunk in batch.prefills)])
        tables = [table[:, : -(-longest // PAGE_TOKENS)] for table in batch.block_tables]
        rows = zip(*(torch.split(t, _ROWS_AT_ONCE) for t in (sequences, contexts)), strict=True)
        hashes = [
            self._hash(pools, [table[owners] for table in tables], lengths)
            for owners, lengths in rows
        ]
        parts = torch.cat(hashes)[:, None] >> self._shifts & 0xFFFF
        return torch.cat((parts, contexts[:, None]), dim=1).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        parts, contexts = hidden[:, :-1].long(), hidden[:, -1].long()
        return self._logits((parts << self._shifts).sum(dim=1), contexts)

    def _sleep(self, batch: ForwardBatch) -> None:
        num_prefill_tokens = sum(chunk.query_len for chunk in batch.prefills)
        wait_s = self.config.step_s + self.config.token_s * num_prefill_tokens
        if wait_s > 0:
            time.sleep(wait_s)

    def _write(self, batch: ForwardBatch, pool: torch.Tensor, rank: HeadRange) -> None:
        tokens = mix(batch.token_ids * 0x10001 + mix(batch.positions))
        cells = (mix(tokens[:, None] + self._cells) & 0xFF).view(-1, *self._shape).to(pool.dtype)
        cells = cells[:, :, :, rank.first : rank.end]
        for layers, slots in zip(self._layers, batch.slot_mappings, strict=True):
            pages, offsets = slots // PAGE_TOKENS, slots % PAGE_TOKENS
            pool[pages, : len(layers), :, :, offsets] = cells[:, layers]

    def _hash(
        self,
        pools: tuple[torch.Tensor, ...],
        tables: list[torch.Tensor],
        contexts: torch.Tensor,
    ) -> torch.Tensor:
        """One int64 a row, over the first `contexts` tokens of its pages; `tables` [rows, blocks]
        by group."""
        positions = torch.arange(tables[0].shape[1] * PAGE_TOKENS, device=contexts.device)
        signatures = torch.zeros_like(positions)
        for group, weights, pages in zip(self.layout.groups, self._weights, tables, strict=True):
            found = self._words_of(pools, weights, pages)
            first = contexts[:, None] - (group.window or len(positions))
            signatures = signatures + torch.where(positions >= first, found, 0)
        seen = positions < contexts[:, None]
        return torch.where(seen, mix(signatures + mix(positions)), 0).sum(dim=1)

    def _words_of(
        self, pools: tuple[torch.Tensor, ...], weights: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """[rows, positions]: words of one group times their weights, each head once. Ranks that
        repeat heads take turns from position to position, so that wrong bytes show in each."""
        positions = torch.arange(pages.shape[1] * PAGE_TOKENS, device=pages.device)
        found = torch.zeros((), dtype=torch.int64, device=pages.device)
        ranks = self.layout.ranks
        for i, (rank, pool) in enumerate(zip(ranks, pools, strict=True)):
            words = pool.view(torch.int64)[pages, : len(weights)]
            heads = weights[:, :, rank.first : rank.end]
            sums = (words * heads).sum(dim=(2, 3, 4, 6)).flatten(1)
            is_turn = positions % ranks.count(rank) == ranks[:i].count(rank)
            found = found + torch.where(is_turn, sums, 0)
        return found

    def _logits(self, hashes: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        noise = mix(mix(hashes)[:, None] ^ self._vocabulary) & 0xFFFF
        logits = noise.to(torch.float32) / 8192
        logits.index_fill_(1, self._eos, _NEVER)
        favourites = (mix(hashes ^ 0x5EED) & 0x7FFFFFFF) % self.vocab_size
        is_eos = torch.isin(favourites, self._eos)
        favourites = torch.where(is_eos, logits.argmax(dim=1), favourites)
        if self.config.eos_every and len(self._eos):
            ends = contexts % self.config.eos_every == 0
            favourites = torch.where(ends, self._eos[0], favourites)
        return logits.scatter(1, favourites[:, None], 10.0)


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 on int64 tensors (wrapping): a bijection that spreads every bit."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
