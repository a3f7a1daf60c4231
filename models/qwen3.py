"""Qwen3: Llama with a norm of each query and key head; the upper layers may have a window."""

from dataclasses import replace
from typing import ClassVar

from paceline.models import qwen2
from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer, Wiring
from paceline.models.windows import late_windows, read_switched_window

DEFAULTS = replace(qwen2.DEFAULTS, head_dim=128)


class Qwen3(Transformer):
    """Qwen3ForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = Wiring(query_key_norm="head")

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        window = read_switched_window(reader.fields, 4096)
        windows = late_windows(reader.fields, reader.num_layers, window)
        bias = reader.fields.flag("attention_bias", False)
        return reader.finish(reader.alike(windows), qkv_bias=bias, out_bias=bias)
