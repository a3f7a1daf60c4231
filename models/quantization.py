"""How a model's weights are held: by name of a setting, or as a checkpoint of integers says.

Modules are imported when asked for. What does not change KV bytes has no place in `semantics`.
"""

import importlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.kernels.product import Matrix, hold
from paceline.kernels.quantized import Quantized
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.models.weights import WeightReader

AS_STORED = "auto"  # the setting under which a model's folder decides
ROUNDED = {  # float weights are rounded while they load
    "int4": "paceline.models.quantization_rounded:int4",
    "int8": "paceline.models.quantization_rounded:int8",
}
CHECKPOINTS = {  # quant_method of config.json → what reads its tensors
    "awq": "paceline.models.quantization_awq:read_config",
    "gptq": "paceline.models.quantization_gptq:read_config",
}
SETTINGS = (AS_STORED, *ROUNDED)


class Part(StrEnum):
    """What a weight is for: some bear less rounding than others."""

    LAYER = "layer"
    VOCABULARY = "vocabulary"  # output and embedding
    ROUTER = "router"  # which experts a token goes to


class Stored(Protocol):
    """Layers side by side whose weights are integers in the checkpoint."""

    @property
    def weight(self) -> Quantized: ...

    @property
    def order(self) -> torch.Tensor | None:
        """[in]: which input each row of `weight` meets; None: its own."""
        ...


class Quantization(Protocol):
    @property
    def semantics(self) -> object:
        """With a stable repr: what decides KV bytes besides the files. None: nothing."""
        ...

    @property
    def rounds_tables(self) -> bool:
        """Whether embeddings are held like output layers."""
        ...

    def read(
        self, reader: "WeightReader", names: Sequence[str], num_in: int, num_out: Sequence[int]
    ) -> Stored | None:
        """None: these layers are floats. Raises ConfigError for what cannot be read exactly."""
        ...

    def hold(self, weight: torch.Tensor, part: Part) -> Matrix:
        """A float weight [in, out]; the caller lets go of its own."""
        ...


class Plain:
    """Weights are the floats that the files hold."""

    semantics: object = None
    rounds_tables = False

    def read(
        self, reader: "WeightReader", names: Sequence[str], num_in: int, num_out: Sequence[int]
    ) -> Stored | None:
        return None

    def hold(self, weight: torch.Tensor, part: Part) -> Matrix:
        return hold(weight)


PLAIN = Plain()


def find_quantization(setting: str, fields: Fields) -> Quantization:
    """By `setting`, one of SETTINGS, and the field quantization_config of a config.json."""
    if setting not in SETTINGS:
        raise ConfigError("quantization", setting, f"must be one of {', '.join(SETTINGS)}")
    stated = fields.get("quantization_config")
    if stated is None:
        if setting == AS_STORED:
            return PLAIN
        return _load(ROUNDED[setting])()
    if setting != AS_STORED:
        reason = f"the model is quantized already; only {AS_STORED} serves it"
        raise ConfigError("quantization", setting, reason)
    if not isinstance(stated, dict):
        raise fields.error("quantization_config", stated, "must be an object")
    inner = Fields(stated, "quantization_config.")
    method = inner.choice("quant_method", CHECKPOINTS)
    return _load(CHECKPOINTS[method])(inner)


def _load(path: str) -> Callable[..., Quantization]:
    module, _, attribute = path.partition(":")
    found: Callable[..., Quantization] = getattr(importlib.import_module(module), attribute)
    return found
