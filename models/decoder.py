"""What the decoder-only families share: loading, and one forward over a paged pool."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Protocol, Self

import torch

from paceline.core.kv_layout import layout_of
from paceline.kernels.attention import AttentionPlan, paged_attention, plan_attention
from paceline.kernels.kv_write import HeadScale, prepare_heads
from paceline.kernels.rope import rope_tables
from paceline.kernels.widen import widened
from paceline.models.base import ForwardBatch
from paceline.models.config import ModelConfig
from paceline.models.decode_program import DecodePrograms, LayerParts, decode_programs
from paceline.models.fused_decode import FusedDecode, fused_decode
from paceline.models.layers import LayerBuilder, Linear
from paceline.models.norms import Norm, WholeNorm
from paceline.models.registry import ModelSource
from paceline.models.rope import inverse_frequencies
from paceline.models.weights import WeightReader

RotaryTables = tuple[torch.Tensor, torch.Tensor]


class Block(Protocol):
    @property
    def norm_1(self) -> Norm: ...

    @property
    def attention(self) -> "Attention": ...

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output product of the attention, then the MLP; may overwrite `hidden`."""
        ...

    def parts(self) -> LayerParts | None:
        """Where the layer has the common shape."""
        ...


class Attention:
    """Self-attention of one layer, up to its output product."""

    def __init__(
        self,
        qkv: Linear,
        config: ModelConfig,
        layer: int,
        norm: HeadScale | WholeNorm | None = None,
    ) -> None:
        self.qkv = qkv
        self.whole_norm = norm if isinstance(norm, WholeNorm) else None
        self.head_scale = norm if isinstance(norm, HeadScale) else None
        self.config = config.attentions[layer]
        rope = self.config.rope
        self.rope_index = None if rope is None else config.ropes.index(rope)
        self.head_dim = config.head_dim

    def __call__(
        self,
        hidden: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        tables: Sequence[RotaryTables],
    ) -> torch.Tensor:
        """[T, hidden] → [T, query heads × dim]; writes the KV of the new tokens.

        `layer`: its index in a page of its group; `plan`: of that group."""
        return self.attend(self.project(hidden, pool, layer, plan, tables), pool, layer, plan)

    def project(
        self,
        hidden: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        tables: Sequence[RotaryTables],
    ) -> torch.Tensor:
        """The first half of a call → queries [T, query heads, dim]."""
        qkv = self.qkv(hidden).view(hidden.shape[0], -1, self.head_dim)
        if self.whole_norm is not None:
            self.whole_norm.apply_(qkv)
        rotation = None if self.rope_index is None else tables[self.rope_index]
        return prepare_heads(qkv, pool, layer, plan, rotation, self.head_scale)

    def attend(
        self, query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan
    ) -> torch.Tensor:
        config = self.config
        return paged_attention(
            query, pool, layer, plan, config.scale, config.window, config.softcap
        ).flatten(1)


class Decoder(ABC):
    """A family derives from it, reads its config and builds its layers in `__init__`."""

    numerics_version: ClassVar[int]
    ignored_tensors: ClassVar[str] = "$^"  # pattern of names that checkpoints carry for nothing

    blocks: Sequence[Block]
    norm: Norm
    head: Linear

    def __init__(self, config: ModelConfig, source: ModelSource, build: LayerBuilder) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.context_length = config.context_length
        self.eos_token_ids = source.eos_token_ids
        self._dtype, self._device = source.dtype, source.device
        dtype = str(source.dtype).removeprefix("torch.")
        windows = [attention.window for attention in config.attentions]
        self.layout = layout_of(windows, config.num_kv_heads, config.head_dim, dtype)
        self._build = build
        self._ropes = [
            (inverse_frequencies(rope).to(source.device), rope.attention_factor)
            for rope in config.ropes
        ]

    @staticmethod
    @abstractmethod
    def read_config(source: ModelSource) -> ModelConfig: ...

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden], new memory."""

    @classmethod
    def load(cls, source: ModelSource) -> tuple[Self, object]:
        config = cls.read_config(source)
        with WeightReader(source.folder, source.progress) as reader:
            model = cls(config, source, LayerBuilder(reader, source))
            reader.finish(cls.ignored_tensors)
        return model, config.semantics

    @cached_property
    def _programs(self) -> DecodePrograms | None:
        parts = [block.parts() for block in self.blocks]
        return decode_programs(parts, self.layout.layers, self.config, self._dtype, self._device)

    @cached_property
    def _fused(self) -> FusedDecode | None:
        parts = [block.parts() for block in self.blocks]
        ends = (self.norm, self.head, self.config.head_dim)
        return fused_decode(parts, self.layout.layers, *ends, self._dtype, self._device)

    @property
    def fuses_decodes(self) -> bool:
        return self._fused is not None

    def weight_bytes(self) -> int:
        return self._build.num_bytes

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self._fused is None or not self._fused.fits(batch):
            return self.logits(self.hidden_states(batch, pools))
        hidden, tables = self._inputs(batch)
        plans = self._plans(batch, hidden.dtype)
        return self._capped(self._fused.logits(hidden, pools[0], plans, tables))

    def hidden_states(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden, tables = self._inputs(batch)
        program = self._programs and self._programs.find(pools[0], batch, tables)
        if program:
            return self._normed(program.run(hidden, batch, tables)[batch.logits_rows])
        plans = self._plans(batch, hidden.dtype)
        for block, (group, layer) in zip(self.blocks, self.layout.layers, strict=True):
            place = (pools[0], layer, plans[group])
            query = block.attention.project(block.norm_1(hidden), *place, tables)
            if block is self.blocks[-1]:  # all KV is written: only rows that are wanted go on
                if not len(batch.logits_rows):
                    return hidden[:0]
                hidden, attended = self._last_rows(hidden, query, batch, *place)
            else:
                attended = block.attention.attend(query, *place)
            hidden = block.feed_forward(hidden, attended)
        return self._normed(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self._capped(widened(self.head(hidden)))

    def _inputs(self, batch: ForwardBatch) -> tuple[torch.Tensor, list[RotaryTables]]:
        """Embedded tokens, and their rotations."""
        hidden = self.embed(batch)
        return hidden, [
            rope_tables(batch.positions, inv_freq, scaling, hidden.dtype)
            for inv_freq, scaling in self._ropes
        ]

    def _last_rows(
        self,
        hidden: torch.Tensor,
        query: torch.Tensor,
        batch: ForwardBatch,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `hidden` that are wanted, and what the last layer's attention makes of them."""
        attention, rows = self.blocks[-1].attention, batch.logits_rows
        if plan.gpu is None or not batch.wants_last_rows:
            return hidden[rows], attention.attend(query, pool, layer, plan)[rows]
        if batch.prefills:  # the last token of each chunk attends as one that decodes
            longest = max(chunk.context_len for chunk in batch.prefills)
            alone = replace(batch, max_context_len=max(batch.max_context_len, longest), prefills=())
            plan = self._plans(alone, hidden.dtype)[self.layout.layers[-1][0]]
            hidden, query = hidden[rows], query[rows]
        return hidden, attention.attend(query, pool, layer, plan)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden) if len(hidden) else hidden

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logits_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _plans(self, batch: ForwardBatch, dtype: torch.dtype) -> list[AttentionPlan]:
        """By page group."""
        prefills = [(chunk.query_len, chunk.context_len) for chunk in batch.prefills]
        tables = zip(self.layout.groups, batch.slot_mappings, batch.block_tables, strict=True)
        return [
            plan_attention(
                group,
                slots,
                table,
                batch.context_lens,
                batch.max_context_len,
                prefills,
                dtype,
                (group.window,),
            )
            for group, slots, table in tables
        ]
