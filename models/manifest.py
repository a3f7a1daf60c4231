"""Digests that name a model: of its weights and of what its KV means.

A file is hashed once; the result is kept in `paceline-manifest.json` beside the weights, or in a
cache folder where the model's own is read-only. A start compares sizes and modification times only.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.host_cpus import usable_cores
from paceline.core.model_files import read_json

MANIFEST_NAME = "paceline-manifest.json"
KEY_FORMAT_VERSION = 1
_HASH_CHUNK_BYTES = 1 << 20
_MAX_HASHED = 8  # files at once


def content_digest(weights: str, semantics: object, kv_dtype: str) -> str:
    """Says when two KV bytes mean the same, of weights with that digest. `semantics` must have a
    stable repr."""
    parts = ("content", KEY_FORMAT_VERSION, weights, repr(semantics), kv_dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def short_digest(value: object) -> str:
    """Of something with a stable repr, for people who compare two."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Over names and contents of the weight files, from the manifest where it is current."""
    files = sorted(folder.glob("*.safetensors"))
    known = _read_manifest(folder)
    with ThreadPoolExecutor(min(_MAX_HASHED, usable_cores())) as threads:  # free of the GIL
        found = threads.map(lambda path: _entry(path, known.get(path.name)), files)
        entries = dict(zip([path.name for path in files], found, strict=True))
    if entries != known:
        _write_manifest(folder, entries)
    text = json.dumps([(name, entry["sha256"]) for name, entry in sorted(entries.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline" / "manifests"


def _entry(path: Path, known: Any) -> dict[str, Any]:
    status = path.stat()
    now = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if isinstance(known, dict) and {**now, "sha256": known.get("sha256")} == known:
        return known
    return {**now, "sha256": file_digest(path)}


def _manifest_paths(folder: Path) -> tuple[Path, Path]:
    """Beside the weights, and the place used where that is read-only."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return folder / MANIFEST_NAME, cache_folder() / f"{name}.json"


def _read_manifest(folder: Path) -> dict[str, Any]:
    for path in _manifest_paths(folder):
        if path.exists():
            try:
                files = read_json(path).get("files")
            except ConfigError:
                continue  # a torn or foreign file: hash again
            if isinstance(files, dict):
                return files
    return {}


def _write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    text = json.dumps({"version": 1, "files": entries}, indent=1)
    for path in _manifest_paths(folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)
            return
        except OSError:
            continue  # read-only: the next place; nowhere: hashed again at the next start
