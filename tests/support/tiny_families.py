"""Tiny models of every family whose weights follow from a formula, without transformers."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from paceline.models import decoder
from paceline.models.loader import load_model
from paceline.models.registry import Progress
from tests.support.families import FAMILIES
from tests.support.tiny_models import write_tiny_gpt2, write_tiny_llama, write_weights


class ShapeRecorder:
    """In the place of a WeightReader: notes what a model asks for."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> "ShapeRecorder":
        return self

    def __exit__(self, *_: object) -> None: ...

    def copy_into(self, name: str, place: torch.Tensor, transposed: bool = False) -> None:
        shape = tuple(place.shape)
        self.shapes[name] = shape[::-1] if transposed else shape
        place.zero_()

    def check_copy(self, name: str, original: str) -> None: ...

    def finish(self, ignored: str) -> None: ...


def write_tiny_family(family: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[family].config("default") | {"architectures": [FAMILIES[family].architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    recorders: list[ShapeRecorder] = []

    def record(folder: Path, progress: Progress) -> ShapeRecorder:
        recorders.append(ShapeRecorder(folder, progress))
        return recorders[-1]

    with patch.object(decoder, "WeightReader", record):
        load_model(folder)
    write_weights(folder, recorders[0].shapes, torch.float32)
    return folder


TINY_WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_tiny_llama,
    "gpt2": write_tiny_gpt2,
} | {family: partial(write_tiny_family, family) for family in FAMILIES}
