"""Qwen2: Llama with biases of query, key and value; the upper layers may have a window."""

from typing import ClassVar

from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer
from paceline.models.windows import late_windows, read_switched_window

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    max_position=32768,
)


class Qwen2(Transformer):
    """Qwen2ForCausalLM."""

    numerics_version: ClassVar[int] = 1

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        window = read_switched_window(reader.fields, 4096)
        windows = late_windows(reader.fields, reader.num_layers, window)
        return reader.finish(reader.alike(windows), qkv_bias=True)
