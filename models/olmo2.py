"""OLMo 2: Llama with norms behind each block instead of before, and over all queries and keys."""

from typing import ClassVar

from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer, Wiring

DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    max_position=2048,
    norm_epsilon=1e-5,
)


class Olmo2(Transformer):
    """Olmo2ForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = Wiring(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
        query_key_norm="whole",
        wide_norms=True,
    )

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        bias = reader.fields.flag("attention_bias", False)
        return reader.finish(reader.alike(), qkv_bias=bias, out_bias=bias)
