"""Reads safetensors, memory-mapped, one tensor at a time into memory that the caller laid out.

Nothing is held twice: a tensor is converted and copied straight from the mapping to its place.
Every tensor of the files must be asked for, with the shape that the file has.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.core.errors import ConfigError
from paceline.core.model_files import read_json
from paceline.models.registry import Progress
from paceline.models.weight_files import INDEX_NAME, weight_files

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WeightReader:
    """The tensors of a folder by name. Use as a context manager: leaving it unmaps the files."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._files = {path: _open(path) for path in weight_files(folder)}
        self._homes: dict[str, Any] = {}
        for file in self._files.values():
            self._homes |= dict.fromkeys(file.keys(), file)
        self._check_index(folder)
        self._asked: set[str] = set()
        self._progress = progress
        self._num_bytes = sum(path.stat().st_size for path in self._files)
        self._num_bytes_read = 0

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._homes.clear()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def copy_into(self, name: str, place: torch.Tensor, transposed: bool = False) -> None:
        """Converts tensor `name` into `place`, which has its shape, or the transposed one."""
        wanted = tuple(reversed(place.shape)) if transposed else tuple(place.shape)
        tensor = self._tensor(name, wanted)
        place.copy_(tensor.t() if transposed else tensor)
        self._count(tensor)

    def floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._count(self._tensor(name, shape))

    def integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._count(self._tensor(name, shape, _INTEGERS))

    def has_all(self, names: Sequence[str], part: str) -> bool:
        """Whether the layers `names` have a tensor `part`. Raises ConfigError if some have."""
        missing = [name for name in names if f"{name}.{part}" not in self]
        if missing and len(missing) < len(names):
            reason = f"tensor is missing, but layers with the same input have one: {names}"
            raise ConfigError("weights", f"{missing[0]}.{part}", reason)
        return not missing

    def check_zeros(self, name: str) -> None:
        """A bias that the model does not have may be stored; it must then change nothing."""
        if name in self and self._tensor(name, None).any():
            raise ConfigError("weights", name, "is not zero, but the model has no such bias")

    def check_copy(self, name: str, original: str) -> None:
        """A tied tensor may be stored too; it must then be the same."""
        if name not in self._homes:
            return
        tensor = self._tensor(original, None)
        if not torch.equal(self._tensor(name, tuple(tensor.shape)), tensor):
            raise ConfigError("weights", name, f"differs from {original}, to which it is tied")

    def finish(self, ignored: str = "$^") -> None:
        """Raises ConfigError if a tensor was never asked for, unless `ignored` matches its name."""
        rest = sorted(n for n in self._homes.keys() - self._asked if not re.search(ignored, n))
        if rest:
            shape = tuple(self._homes[rest[0]].get_slice(rest[0]).get_shape())
            reason = f"tensor {shape} has no place in the model, {len(rest)} in all"
            raise ConfigError("weights", rest[0], reason)
        self._progress(self._num_bytes, self._num_bytes)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self._num_bytes_read += tensor.nbytes
        self._progress(self._num_bytes_read, self._num_bytes)
        return tensor

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        types: tuple[torch.dtype, ...] = _FLOATS,
    ) -> torch.Tensor:
        file = self._homes.get(name)
        if file is None:
            raise ConfigError("weights", name, f"tensor is missing, shape {shape} is needed")
        self._asked.add(name)
        found = tuple(file.get_slice(name).get_shape())
        if shape is not None and found != shape:
            raise ConfigError("weights", name, f"tensor has shape {found}, {shape} is needed")
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.dtype not in types:
            raise ConfigError("weights", name, f"tensor of type {tensor.dtype} is not supported")
        return tensor

    def _check_index(self, folder: Path) -> None:
        if not (folder / INDEX_NAME).exists():
            return
        for name in read_json(folder / INDEX_NAME)["weight_map"]:
            if name not in self._homes:
                raise ConfigError("weights", name, f"is in {INDEX_NAME} but in none of its files")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError("weights", path.name, f"cannot be read: {error}") from None
