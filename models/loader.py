"""From a folder to a model that is ready to run, with the digests that name what it is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import ELEMENT_BYTES
from paceline.core.model_files import eos_token_ids, read_json
from paceline.core.serving_digest import serving_digest
from paceline.kernels import backend
from paceline.models.base import Model
from paceline.models.fields import Fields
from paceline.models.manifest import (
    KEY_FORMAT_VERSION,
    content_digest,
    short_digest,
    weights_digest,
)
from paceline.models.quantization import AS_STORED, find_quantization
from paceline.models.registry import ModelSource, Progress, find_model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    architecture: str
    content_digest: str  # hex: when two KV bytes mean the same
    content_parts: dict[str, str]  # what it is made of, by name: where two differ
    serving_digest: str  # hex: tokenizer and chat template


def load_model(
    folder: Path,
    device: str = "cpu",
    dtype: str = "float32",
    max_context_length: int | None = None,
    kernels: str = "auto",
    quantization: str = AS_STORED,
    progress: Progress = lambda done, total: None,
) -> LoadedModel:
    """Reads config.json and weights under `folder`. Raises ConfigError naming what is wrong.

    `kernels`: of a CUDA device, see kernels/backend.py; for all models of the process.
    `max_context_length` serves less than the model can, or a rope scaling further: models/rope.py.
    `quantization`: models/quantization.py.
    """
    if dtype not in ELEMENT_BYTES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(ELEMENT_BYTES)}")
    if torch.device(device).type == "cuda":
        backend.select(kernels, torch.device(device))
    fields = Fields(read_json(folder / "config.json"))
    architecture, found = find_model(fields)
    source = ModelSource(
        folder=folder,
        fields=fields,
        device=torch.device(device),
        dtype=getattr(torch, dtype),
        eos_token_ids=eos_token_ids(folder),
        max_context_length=max_context_length,
        progress=progress,
        quantization=find_quantization(quantization, fields),
    )
    model, semantics = found.load(source)
    named: tuple[object, ...] = (architecture, found.numerics_version, semantics)
    rounding = source.quantization.semantics
    if rounding is not None:
        named = (*named, rounding)
    weights = weights_digest(folder)
    parts = {
        "architecture": architecture,
        "numerics": str(found.numerics_version),
        "config": short_digest(semantics),
        "quantization": short_digest(rounding),
        "weights": weights[:16],
        "kv_dtype": dtype,
        "key_format": str(KEY_FORMAT_VERSION),
    }
    return LoadedModel(
        model,
        architecture,
        content_digest(weights, named, dtype),
        parts,
        serving_digest(folder),
    )
