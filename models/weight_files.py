"""Which files of a folder hold its weights, and how much memory they will take. Needs no torch."""

import json
import math
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.model_files import MAX_JSON_BYTES, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


def weight_files(folder: Path) -> list[Path]:
    """Raises ConfigError when one is missing."""
    files = [folder / name for name in _names(folder)]
    for path in files:
        if not path.is_file():
            raise ConfigError("weights", path.name, "file is missing")
    return files


def num_resident_bytes(files: list[Path], element_bytes: float) -> int:
    """Of weights whose floats are held with `element_bytes` each and all else as it is stored."""
    return sum(_num_bytes(fields, element_bytes) for path in files for fields in _tensors(path))


def _names(folder: Path) -> list[str]:
    if not (folder / INDEX_NAME).exists():
        return [SINGLE_NAME]
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError("weights", INDEX_NAME, "has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError("weights", name, "must be a safetensors file beside the index")
    return names


def _tensors(path: Path) -> list[dict[str, Any]]:
    """What the header of a safetensors file says of each; whoever loads it checks it in full."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= MAX_JSON_BYTES else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("weights", path.name, f"cannot be read: {error}") from None
    rows = header.items() if isinstance(header, dict) else ()
    return [row for name, row in rows if name != "__metadata__" and isinstance(row, dict)]


def _num_bytes(fields: dict[str, Any], element_bytes: float) -> int:
    try:
        if fields["dtype"] in _FLOATS:
            return round(math.prod(map(int, fields["shape"])) * element_bytes)
        first, last = map(int, fields["data_offsets"])
        return last - first
    except (KeyError, TypeError, ValueError):
        return 0
