"""The shape that most families share: RMS norms, rotary attention with grouped heads, gated MLP.

    hidden += after_attention(out(attention(before_attention(hidden))))
    hidden += after_mlp(mlp(before_mlp(hidden)))

A family states its `wiring`, reads its config and overrides what else is its own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.kernels.kv_write import HeadScale
from paceline.models.base import ForwardBatch
from paceline.models.config import ModelConfig
from paceline.models.decode_program import LayerParts
from paceline.models.decoder import Attention, Decoder
from paceline.models.layers import ACTIVATIONS, LayerBuilder, Linear
from paceline.models.mlp import MLP, GatedMLP
from paceline.models.norms import NoNorm, Norm, RMSNorm, WholeNorm
from paceline.models.registry import ModelSource


@dataclass(frozen=True, slots=True)
class Wiring:
    """Names of a layer's tensors, and which norms it has. An empty name: no norm at that place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    query_key_norm: str = ""  # of each "head", or of the "whole"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: they lie in one tensor
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    wide_norms: bool = False  # the weight is applied before rounding to the model's type
    norm_offset: float = 0.0  # is added to the weight


@dataclass(frozen=True, slots=True)
class TransformerBlock:
    attention: Attention
    out: Linear
    mlp: MLP
    norm_1: Norm
    norm_2: Norm
    after_attention: RMSNorm | None
    after_mlp: RMSNorm | None

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        if self.after_attention is None:
            hidden = self.out.add_to(hidden, attended)
        else:
            hidden = self.after_attention.add_to(hidden, self.out(attended))
        if self.after_mlp is None:
            return self.mlp.add_to(hidden, self.norm_2(hidden))
        return self.after_mlp.add_to(hidden, self.mlp(self.norm_2(hidden)))

    def parts(self) -> LayerParts | None:
        attention, mlp = self.attention, self.mlp
        is_plain = self.after_attention is None and self.after_mlp is None
        has_norms = isinstance(self.norm_1, RMSNorm) and isinstance(self.norm_2, RMSNorm)
        is_common = is_plain and has_norms and attention.whole_norm is None
        if not is_common or not isinstance(mlp, GatedMLP):
            return None
        assert isinstance(self.norm_1, RMSNorm) and isinstance(self.norm_2, RMSNorm)
        return LayerParts(
            self.norm_1,
            attention.qkv,
            attention.head_scale,
            attention.config,
            attention.rope_index,
            self.out,
            self.norm_2,
            mlp.gate_up,
            mlp.act,
            mlp.down,
        )


class Transformer(Decoder):
    wiring: ClassVar[Wiring] = Wiring()
    ignored_tensors: ClassVar[str] = r"rotary_emb\.inv_freq$"

    def __init__(self, config: ModelConfig, source: ModelSource, build: LayerBuilder) -> None:
        super().__init__(config, source, build)
        names = ("model.embed_tokens", "lm_head")
        self.embedding, self.head = build.embeddings(names, config)
        self.blocks = [self.block(build, layer) for layer in range(config.num_layers)]
        self.norm = self.rms_norm(build, "model.norm")

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embedding(batch.token_ids)
        scale = self.config.embedding_scale
        return embedded if scale == 1 else embedded.mul_(scale)

    def block(self, build: LayerBuilder, layer: int) -> TransformerBlock:
        config, wiring = self.config, self.wiring
        name = f"model.layers.{layer}"
        queries = config.num_heads * config.head_dim

        def norm(part: str) -> RMSNorm | None:
            return self.rms_norm(build, f"{name}.{part}") if part else None

        return TransformerBlock(
            attention=self.attention(build, layer, f"{name}.self_attn"),
            out=build.linear(
                [f"{name}.self_attn.o_proj"], queries, [config.hidden_size], config.out_bias
            ),
            mlp=self.mlp(build, layer, name),
            norm_1=norm(wiring.before_attention) or NoNorm(),
            norm_2=norm(wiring.before_mlp) or NoNorm(),
            after_attention=norm(wiring.after_attention),
            after_mlp=norm(wiring.after_mlp),
        )

    def attention(self, build: LayerBuilder, layer: int, name: str) -> Attention:
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names, sizes = _joined(name, self.wiring.qkv, [queries, keys, keys])
        qkv = build.linear(names, config.hidden_size, sizes, config.qkv_bias)
        return Attention(qkv, config, layer, self.query_key_norm(build, name))

    def query_key_norm(self, build: LayerBuilder, name: str) -> HeadScale | WholeNorm | None:
        kind, config = self.wiring.query_key_norm, self.config
        if not kind:
            return None
        heads = (config.num_heads, config.num_kv_heads)
        sizes = [config.head_dim * (num if kind == "whole" else 1) for num in heads]
        query, key = (
            self.norm_weight(build, f"{name}.{part}_norm", size)
            for part, size in zip("qk", sizes, strict=True)
        )
        if kind == "whole":
            return WholeNorm(query, key, config.norm_epsilon)
        weight = torch.cat((query.expand(heads[0], -1), key.expand(heads[1], -1)))
        return HeadScale(weight, config.norm_epsilon)

    def mlp(self, build: LayerBuilder, layer: int, name: str) -> MLP:
        """`name`: of the layer."""
        inner = self.config.intermediate_size
        return self.gated_mlp(build, f"{name}.mlp", inner, (*self.wiring.gate_up, "down_proj"))

    def gated_mlp(
        self, build: LayerBuilder, name: str, inner: int, parts: tuple[str, ...]
    ) -> GatedMLP:
        """`parts`: names of gate and up, or of both in one, and of down."""
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        names, sizes = _joined(name, parts[:-1], [inner, inner])
        gate_up = build.linear(names, hidden, sizes, bias)
        down = build.linear([f"{name}.{parts[-1]}"], inner, [hidden], bias)
        return GatedMLP(gate_up, down, ACTIVATIONS[self.config.activation])

    def rms_norm(self, build: LayerBuilder, name: str) -> RMSNorm:
        weight = self.norm_weight(build, name, self.config.hidden_size)
        return RMSNorm(weight, self.config.norm_epsilon)

    def norm_weight(self, build: LayerBuilder, name: str, size: int) -> torch.Tensor:
        dtype = torch.float32 if self.wiring.wide_norms else None
        return build.vector(f"{name}.weight", size, dtype).add_(self.wiring.norm_offset)


def _joined(name: str, parts: tuple[str, ...], sizes: list[int]) -> tuple[list[str], list[int]]:
    """Tensors and their sizes, where one may hold all."""
    names = [f"{name}.{part}" for part in parts]
    return names, sizes if len(parts) > 1 else [sum(sizes)]
