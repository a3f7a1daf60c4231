"""Files of API keys for tests."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def entry(name: str, keys: Iterable[str], **limits: float) -> str:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    lines = [f"[tenants.{name}]", f"keys = {digests}"]
    return "\n".join([*lines, *(f"{limit} = {value}" for limit, value in limits.items()), ""])


def write(path: Path, *entries: str) -> Path:
    """In one move, as a file that others read is written."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(entries))
    os.replace(new, path)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
