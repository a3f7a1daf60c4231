"""Llama: rotary positions, grouped heads, RMS norms before each block, gated MLP.

Every rope scaling of models/rope.py, tied embeddings, biases of attention and MLP, own head_dim.
"""

from typing import ClassVar

import torch

from paceline.kernels.rope import rope_tables
from paceline.models.base import ForwardBatch
from paceline.models.config import ModelConfig, check_unread, served_context
from paceline.models.decoder import Attention, Decoder, RotaryTables
from paceline.models.layers import ACTIVATIONS, LayerBuilder, RMSNorm
from paceline.models.registry import ModelSource
from paceline.models.rope import inverse_frequencies, longest_context, read_rope


class LlamaBlock:
    def __init__(self, build: LayerBuilder, config: ModelConfig, layer: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        name = f"model.layers.{layer}"
        parts = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        qkv = build.linear(parts, hidden, [queries, keys, keys], config.attention_bias)
        self.attention = Attention(qkv, config, layer)
        self.out = build.linear(
            [f"{name}.self_attn.o_proj"], queries, [hidden], config.attention_bias
        )
        gates = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = build.linear(gates, hidden, [inner, inner], config.mlp_bias)
        self.down = build.linear([f"{name}.mlp.down_proj"], inner, [hidden], config.mlp_bias)
        self.norm_1 = _norm(build, f"{name}.input_layernorm", config)
        self.norm_2 = _norm(build, f"{name}.post_attention_layernorm", config)
        self.act = ACTIVATIONS[config.activation]

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self.out.add_to(hidden, attended)
        gate, up = self.gate_up(self.norm_2(hidden)).chunk(2, dim=-1)
        return self.down.add_to(hidden, self.act(gate) * up)


class Llama(Decoder):
    """LlamaForCausalLM."""

    numerics_version: ClassVar[int] = 1
    ignored_tensors: ClassVar[str] = r"rotary_emb\.inv_freq$"

    def __init__(self, config: ModelConfig, source: ModelSource, build: LayerBuilder) -> None:
        super().__init__(config, source, build)
        assert config.rope is not None
        names = ("model.embed_tokens", "lm_head")
        self.embedding, self.head = build.embeddings(names, config)
        self.blocks = [LlamaBlock(build, config, i) for i in range(config.num_layers)]
        self.norm = _norm(build, "model.norm", config)
        self.inv_freq = inverse_frequencies(config.rope).to(source.device)
        self.rope_scaling = config.rope.attention_factor

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding(batch.token_ids)

    def rotary_tables(self, batch: ForwardBatch, dtype: torch.dtype) -> RotaryTables:
        return rope_tables(batch.positions, self.inv_freq, self.rope_scaling, dtype)

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        """Absent fields have the defaults of transformers' LlamaConfig."""
        fields = source.fields
        max_position = fields.integer("max_position_embeddings", 2048)
        longest = longest_context(fields, max_position)
        context_length = served_context(max_position, longest, source.max_context_length)
        hidden_size = fields.integer("hidden_size", 4096)
        num_heads = fields.integer("num_attention_heads", 32)
        num_layers = fields.integer("num_hidden_layers", 32)
        head_dim = fields.integer("head_dim", hidden_size // num_heads)
        config = ModelConfig(
            vocab_size=fields.integer("vocab_size", 32000),
            max_position=max_position,
            context_length=context_length,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            attention_scales=(head_dim**-0.5,) * num_layers,
            rope=read_rope(fields, head_dim, max_position, context_length),
        )
        check_unread(fields)
        return config


def _norm(build: LayerBuilder, name: str, config: ModelConfig) -> RMSNorm:
    return RMSNorm(build.vector(f"{name}.weight", config.hidden_size), config.norm_epsilon)
