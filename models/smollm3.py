"""SmolLM3: Llama with layers that do not rotate; those may have a window."""

from typing import ClassVar

from paceline.models.config import AttentionConfig, ModelConfig
from paceline.models.fields import Fields
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer
from paceline.models.windows import FULL, SLIDING, read_switched_window, typed_windows

DEFAULTS = Defaults(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=4,
    max_position=32768,
    tied_embeddings=True,
    theta=2_000_000.0,
)


class SmolLM3(Transformer):
    """SmolLM3ForCausalLM."""

    numerics_version: ClassVar[int] = 1

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        fields = reader.fields
        rotating = _rotating_layers(fields, reader.num_layers)
        window = read_switched_window(fields)
        types = [SLIDING if window and not rotates else FULL for rotates in rotating]
        windows = typed_windows(fields, window, types)
        scale, rope = reader.head_dim**-0.5, reader.rope()
        attentions = tuple(
            AttentionConfig(scale, rope if rotates else None, window)
            for rotates, window in zip(rotating, windows, strict=True)
        )
        bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return reader.finish(attentions, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _rotating_layers(fields: Fields, num_layers: int) -> list[bool]:
    """`no_rope_layers` has a 1 for each layer that rotates, and may be longer than needed."""
    interval = fields.integer("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    marks = fields.get("no_rope_layers", default)
    if not isinstance(marks, list) or len(marks) < num_layers or not set(marks) <= {0, 1}:
        reason = f"must hold 0 or 1 for each of {num_layers} layers"
        raise fields.error("no_rope_layers", marks, reason)
    return [bool(mark) for mark in marks[:num_layers]]
