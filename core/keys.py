"""Names of KV blocks: a SHA-256 chain over blocks of 16 tokens.

    key[i] = SHA-256(tag ‖ len ‖ parent ‖ len ‖ tokens as u32 ‖ number of extras)
    key[-1] = root = SHA-256(tag ‖ len ‖ content digest ‖ len ‖ tenant salt)

All integers little-endian, every part length-prefixed. `extras` will list the non-token inputs
(images, audio) that overlap a block; there are none today. Gateway, router and workers share this
module, so a key means the same everywhere; golden vectors pin it.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.errors import EngineFailure
from paceline.core.ids import BlockKey

_chain_keys_native: Callable[[bytes, bytes], bytes] | None
try:
    from paceline.core._native import chain_keys as _chain_keys_native
except ImportError:  # a source tree without a compiler still works, slower
    _chain_keys_native = None

HASH_BLOCK_TOKENS = 16
KEY_BYTES = 32
INDEX_KEY_BYTES = 16  # enough for a hint; pins use the whole key
_ROOT_TAG = b"pl-root1"
_KEY_TAG = b"pl-key-1"
_SELF_TEST_KEY = "f175bb50e830f6cbdccb46d2fb97363eaeead4ad66af36ed3a0075f08c003ba0"


def tenant_salt(secret: bytes, tenant: str, version: int = 1) -> bytes:
    """Separates tenants: without the deployment's secret nobody can choose another's salt."""
    return hmac.digest(secret, struct.pack("<I", version) + tenant.encode(), "sha256")


def tenant_digest(secret: bytes, tenant: str) -> str:
    """Stands for a tenant in logs, traces and pages for operators: 16 hex digits, the same in all
    services of a deployment. Says nothing of the name, or of the salt, to who lacks the secret."""
    return hmac.digest(secret, b"pl-tenant" + tenant.encode(), "sha256")[:8].hex()


def narrowed_salt(salt: bytes, part: str | None) -> bytes:
    """Of a part of what a tenant's `salt` names, and no other tenant's; None: of all of it."""
    return salt if part is None else hmac.digest(salt, b"pl-nsalt" + part.encode(), "sha256")


def root_key(content_digest: str, salt: bytes) -> BlockKey:
    """Parent of a chain's first block. `content_digest` is hex: when two KV bytes mean the same."""
    digest = bytes.fromhex(content_digest)
    message = _ROOT_TAG + _prefixed(digest) + _prefixed(salt)
    return BlockKey(hashlib.sha256(message).digest())


def chain_keys(parent: bytes, token_ids: Sequence[int]) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, whose first token follows the block `parent`."""
    packed = np.asarray(token_ids, dtype="<u4").tobytes()
    if _chain_keys_native is None:
        return chain_keys_reference(parent, packed)
    keys = _chain_keys_native(parent, packed)
    return [BlockKey(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES)]


def chain_keys_reference(parent: bytes, packed_token_ids: bytes) -> list[BlockKey]:
    """The definition, in plain Python. `packed_token_ids`: u32 little-endian."""
    block_bytes = 4 * HASH_BLOCK_TOKENS
    keys = []
    for start in range(0, len(packed_token_ids) - block_bytes + 1, block_bytes):
        block = packed_token_ids[start : start + block_bytes]
        message = _KEY_TAG + _prefixed(parent) + _prefixed(block) + struct.pack("<I", 0)
        parent = hashlib.sha256(message).digest()
        keys.append(BlockKey(parent))
    return keys


def self_test() -> None:
    """Raises EngineFailure when this process names blocks differently than every other.

    Two blocks of known tokens; the key of the second depends on the first. Run at startup: a
    difference would otherwise show only as a cache that never hits.
    """
    chain = chain_keys(root_key("00" * 32, bytes(32)), range(2 * HASH_BLOCK_TOKENS))
    if chain[-1].hex() != _SELF_TEST_KEY:
        raise EngineFailure(f"block keys differ: got {chain[-1].hex()}, must be {_SELF_TEST_KEY}")


def _prefixed(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part
