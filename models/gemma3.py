"""Gemma 3, text: Gemma 2 without capped scores, with norms of each query and key head.

Five of six layers have a window, and frequencies of their own.
"""

from dataclasses import replace
from typing import ClassVar

from paceline.models import gemma2
from paceline.models.config import AttentionConfig, ModelConfig
from paceline.models.fields import Fields
from paceline.models.reading import ConfigReader
from paceline.models.registry import ModelSource
from paceline.models.rope import Lengths, RopeConfig, read_rope
from paceline.models.transformer import Transformer, Wiring
from paceline.models.windows import FULL, SLIDING, read_window, typed_windows

DEFAULTS = replace(gemma2.DEFAULTS, vocab_size=262_208, max_position=131_072)
OLD_THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


class Gemma3(Transformer):
    """Gemma3ForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = replace(gemma2.WIRING, query_key_norm="head")

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        fields = reader.fields
        period = fields.integer("sliding_window_pattern", 6)
        types = [SLIDING if (i + 1) % period else FULL for i in range(reader.num_layers)]
        windows = typed_windows(fields, read_window(fields, 4096), types)
        full, sliding = read_ropes(reader)
        scale = gemma2.read_scale(fields)
        attentions = tuple(AttentionConfig(scale, sliding if w else full, w) for w in windows)
        logits_softcap = gemma2.read_softcap(fields, "final_logit_softcapping", 0.0)
        return reader.finish(
            attentions, logits_softcap=logits_softcap, **gemma2.read_common(source, reader)
        )


def read_ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """Of full layers and of those with a window. `rope_scaling` of older configs is of the full."""
    fields = reader.fields
    raw = fields.get("rope_parameters", {})
    if not isinstance(raw, dict) or not set(raw) <= {FULL, SLIDING}:
        reason = f"must have parameters for {FULL} and {SLIDING}"
        raise fields.error("rope_parameters", raw, reason)
    old = {FULL: fields.get("rope_scaling", {}), SLIDING: {}}
    lengths = Lengths(reader.max_position, reader.context_length)

    def read(kind: str) -> RopeConfig:
        rope = Fields((raw.get(kind) or {}) | old[kind], f"rope_parameters.{kind}.")
        return read_rope(rope, reader.head_dim, fields.number(*OLD_THETAS[kind]), lengths)

    return read(FULL), read(SLIDING)
