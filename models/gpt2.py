"""GPT-2: learned positions, full heads, layer norms before each block, biases everywhere.

`reorder_and_upcast_attn` changes the order of rounding only, and attention sums in float32 anyway.
"""

from typing import ClassVar

import torch

from paceline.models.base import ForwardBatch
from paceline.models.config import AttentionConfig, ModelConfig, check_unread, served_context
from paceline.models.decoder import Attention, Decoder
from paceline.models.fields import Fields
from paceline.models.layers import ACTIVATIONS, LayerBuilder
from paceline.models.norms import LayerNorm
from paceline.models.registry import ModelSource


class GPT2Block:
    def __init__(self, build: LayerBuilder, config: ModelConfig, name: str, layer: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = build.conv1d(f"{name}.attn.c_attn", hidden, 3 * hidden)
        self.attention = Attention(qkv, config, layer)
        self.out = build.conv1d(f"{name}.attn.c_proj", hidden, hidden)
        self.up = build.conv1d(f"{name}.mlp.c_fc", hidden, inner)
        self.down = build.conv1d(f"{name}.mlp.c_proj", inner, hidden)
        self.norm_1 = _norm(build, f"{name}.ln_1", config)
        self.norm_2 = _norm(build, f"{name}.ln_2", config)
        self.act = ACTIVATIONS[config.activation]

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.out.add_to(hidden, attended)
        return self.down.add_to(hidden, self.act(self.up(self.norm_2(hidden))))

    def parts(self) -> None:
        """Layer norms and a plain MLP: not the common shape."""


class GPT2(Decoder):
    """GPT2LMHeadModel. The first checkpoints have no `transformer.` before their names."""

    numerics_version: ClassVar[int] = 1
    ignored_tensors: ClassVar[str] = r"\.attn\.(masked_)?bias$"

    def __init__(self, config: ModelConfig, source: ModelSource, build: LayerBuilder) -> None:
        super().__init__(config, source, build)
        prefix = "" if "wte.weight" in build.reader else "transformer."
        names = (f"{prefix}wte", "lm_head")
        self.embedding, self.head = build.embeddings(names, config)
        self.positions = build.table(f"{prefix}wpe", config.max_position, config.hidden_size)
        self.blocks = [
            GPT2Block(build, config, f"{prefix}h.{i}", i) for i in range(config.num_layers)
        ]
        self.norm = _norm(build, f"{prefix}ln_f", config)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding(batch.token_ids).add_(self.positions.index_select(0, batch.positions))

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        """Absent fields have the defaults of transformers' GPT2Config."""
        fields = source.fields
        max_position = fields.integer("n_positions", 1024)
        hidden_size = fields.integer("n_embd", 768)
        num_heads = fields.integer("n_head", 12)
        num_layers = fields.integer("n_layer", 12)
        if hidden_size % num_heads:
            raise fields.error("n_head", num_heads, f"must divide n_embd, {hidden_size}")
        config = ModelConfig(
            vocab_size=fields.integer("vocab_size", 50257),
            max_position=max_position,
            context_length=served_context(max_position, max_position, source.max_context_length),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("n_inner", 4 * hidden_size),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
            norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
            tied_embeddings=fields.flag("tie_word_embeddings", True),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attentions=_attentions(fields, hidden_size // num_heads, num_layers),
        )
        fields.flag("reorder_and_upcast_attn", False)
        check_unread(fields)
        return config


def _attentions(fields: Fields, head_dim: int, num_layers: int) -> tuple[AttentionConfig, ...]:
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    return tuple(
        AttentionConfig(scale / (layer + 1 if by_layer else 1)) for layer in range(num_layers)
    )


def _norm(build: LayerBuilder, name: str, config: ModelConfig) -> LayerNorm:
    weight, bias = (
        build.vector(f"{name}.{part}", config.hidden_size) for part in ("weight", "bias")
    )
    return LayerNorm(weight, bias, config.norm_epsilon)
