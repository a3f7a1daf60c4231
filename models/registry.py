"""What every model is made from and with; finds the class that wires an architecture."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from paceline.models.architectures import MODELS, architecture_of
from paceline.models.base import Model
from paceline.models.fields import Fields
from paceline.models.quantization import PLAIN, Quantization

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


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
    name = architecture_of(fields.get("architectures", []))
    module, _, attribute = MODELS[name].partition(":")
    found: type[ModelClass] = getattr(importlib.import_module(module), attribute)
    return name, found
