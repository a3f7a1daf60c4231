"""Gemma 2: norms before and behind each block, capped scores and logits, every other layer with a
window, scaled embeddings. The weight of a norm is stored without the 1 that belongs to it.
"""

import math
from typing import Any, ClassVar

import torch

from paceline.models.config import AttentionConfig, ModelConfig
from paceline.models.fields import Fields
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer, Wiring
from paceline.models.windows import FULL, SLIDING, read_window, typed_windows

DEFAULTS = Defaults(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_position=8192,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied_embeddings=True,
)
WIRING = Wiring(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    wide_norms=True,
    norm_offset=1.0,
)


class Gemma2(Transformer):
    """Gemma2ForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = WIRING

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        fields = reader.fields
        types = [FULL if layer % 2 else SLIDING for layer in range(reader.num_layers)]
        windows = typed_windows(fields, read_window(fields, 4096), types)
        scale, rope = read_scale(fields), reader.rope()
        cap = read_softcap(fields, "attn_logit_softcapping", 50.0)
        attentions = tuple(AttentionConfig(scale, rope, window, cap) for window in windows)
        logits_softcap = read_softcap(fields, "final_logit_softcapping", 30.0)
        return reader.finish(
            attentions, logits_softcap=logits_softcap, **read_common(source, reader)
        )


def read_common(source: ModelSource, reader: ConfigReader) -> dict[str, Any]:
    """Arguments of ModelConfig that all of Gemma share."""
    reader.fields.get("hidden_act")  # older configs have it, too; hidden_activation decides
    bias = reader.fields.flag("attention_bias", False)
    scale = torch.tensor(math.sqrt(reader.hidden_size), dtype=source.dtype).item()
    return {"qkv_bias": bias, "out_bias": bias, "embedding_scale": scale}


def read_scale(fields: Fields) -> float:
    scalar: float = fields.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise fields.error("query_pre_attn_scalar", scalar, "must be positive")
    return float(scalar**-0.5)


def read_softcap(fields: Fields, name: str, default: float) -> float:
    """Null means none; so does 0 as a default."""
    cap: float = 0.0 if fields.is_null(name) else fields.number(name, default)
    if name in fields.raw and cap <= 0 and not fields.is_null(name):
        raise fields.error(name, cap, "must be positive")
    return cap
