"""Llama: rotary positions, grouped heads, RMS norms before each block, gated MLP.

Every rope scaling of models/rope.py, tied embeddings, biases of attention and MLP, own head_dim.
"""

from typing import ClassVar

from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    max_position=2048,
)


class Llama(Transformer):
    """LlamaForCausalLM."""

    numerics_version: ClassVar[int] = 1

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        bias = reader.fields.flag("attention_bias", False)
        mlp_bias = reader.fields.flag("mlp_bias", False)
        return reader.finish(reader.alike(), qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
