"""Serving digest: says when two processes turn text into the same tokens.

    SHA-256(tag ‖ for each file of FILES: presence byte ‖ [len as u64 little-endian ‖ content])

Gateway (which tokenises) and workers (which hold the weights) compute it over their own copy of
the model directory; a gateway serves only models whose digest equals its own.
"""

import hashlib
from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_TAG = b"pl-serv1"


def serving_digest(model_dir: Path) -> str:
    """Hex digest over tokenizer and chat template. A missing file counts as missing."""
    digest = hashlib.sha256(_TAG)
    for name in FILES:
        path = model_dir / name
        if not path.is_file():
            digest.update(b"\0")
            continue
        content = path.read_bytes()
        digest.update(b"\1" + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
