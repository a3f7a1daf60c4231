"""Mistral: Llama with a sliding window in every layer."""

from typing import ClassVar

from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer
from paceline.models.windows import read_window, uniform_windows

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_position=4096 * 32,
)


class Mistral(Transformer):
    """MistralForCausalLM."""

    numerics_version: ClassVar[int] = 1

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        window = read_window(reader.fields, 4096)
        windows = uniform_windows(reader.fields, reader.num_layers, window)
        return reader.finish(reader.alike(windows))
