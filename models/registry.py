"""Architecture name of config.json → the class that wires it, imported when asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.models.base import Model
from paceline.models.fields import Fields
from paceline.models.quantization import PLAIN, Quantization

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

MODELS = {
    "GPT2LMHeadModel": "paceline.models.gpt2:GPT2",
    "Gemma2ForCausalLM": "paceline.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "paceline.models.gemma3:Gemma3",
    "LlamaForCausalLM": "paceline.models.llama:Llama",
    "MistralForCausalLM": "paceline.models.mistral:Mistral",
    "MixtralForCausalLM": "paceline.models.mixtral:Mixtral",
    "Olmo2ForCausalLM": "paceline.models.olmo2:Olmo2",
    "PacelineMockForCausalLM": "paceline.models.mock:MockModel",
    "Phi3ForCausalLM": "paceline.models.phi3:Phi3",
    "Qwen2ForCausalLM": "paceline.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "paceline.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "paceline.models.qwen3_moe:Qwen3Moe",
    "SmolLM3ForCausalLM": "paceline.models.smollm3:SmolLM3",
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model is made from."""

    folder: Path
    fields: Fields  # of config.json
    device: torch.device
    dtype: torch.dtype  # of weights and KV
    eos_token_ids: tuple[int, ...]
    max_context_length: int | None  # None: what the model states
    progress: Progress
    quantization: Quantization = PLAIN


class ModelClass(Protocol):
    """How a family is found and built. Bump `numerics_version` when its KV bytes change."""

    numerics_version: ClassVar[int]

    @classmethod
    def load(cls, source: ModelSource) -> tuple[Model, object]:
        """The model and, with a stable repr, what besides the weights decides its KV bytes.

        Raises ConfigError for fields or tensors that it cannot honour.
        """
        ...


def find_model(fields: Fields) -> tuple[str, type[ModelClass]]:
    """The architecture's name and class, by `architectures` of config.json."""
    names = fields.get("architectures", [])
    name = names[0] if isinstance(names, list) and names else None
    if name not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ConfigError("architectures", name, f"unknown architecture; known: {known}")
    module, _, attribute = MODELS[name].partition(":")
    found: type[ModelClass] = getattr(importlib.import_module(module), attribute)
    return name, found
