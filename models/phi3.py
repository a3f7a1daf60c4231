"""Phi-3: Llama whose query, key and value lie in one tensor, as do gate and up.

Phi-3 mini has a window, the long-context ones longrope, and Phi-4 mini rotates a part of each head.
"""

from typing import ClassVar

from paceline.models.config import ModelConfig
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer, Wiring
from paceline.models.windows import read_window, uniform_windows

DEFAULTS = Defaults(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=32,
    num_heads=32,
    max_position=4096,
    norm_epsilon=1e-5,
)
ORIGINAL_LENGTH = 4096  # original_max_position_embeddings


class Phi3(Transformer):
    """Phi3ForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = Wiring(qkv=("qkv_proj",), gate_up=("gate_up_proj",))

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        windows = uniform_windows(reader.fields, reader.num_layers, read_window(reader.fields))
        rope = reader.rope(partial=True, original=ORIGINAL_LENGTH)
        return reader.finish(reader.alike(windows, rope))
