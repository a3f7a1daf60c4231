"""What more than one service reads of a model's folder."""

import json
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is not there, too big or something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError("model", path.name, f"larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError("model", str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", path.name, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("model", path.name, "must hold a JSON object")
    return value


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: of generation_config.json where it names any, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists() and (ids := _token_ids(read_json(folder / name))):
            return ids
    return ()


def _token_ids(fields: dict[str, Any]) -> tuple[int, ...]:
    """One id, a list of ids, or nothing."""
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError("eos_token_id", value, "must be a token id or a list of token ids")
    return tuple(ids)
