import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import _native, keys
from paceline.core.errors import EngineFailure
from paceline.engine.sequence import Sequence
from paceline.gateway.prompts import _hashed
from paceline.v1.control_pb2 import ModelInfo

CONTENT_DIGEST = "00" * 31 + "01"
SALT = keys.tenant_salt(b"secret", "tenant-a")
ROOT = keys.root_key(CONTENT_DIGEST, SALT)
TOKENS = range(49100, 49148)
GOLDEN_SALT = "d0ff6d984c039f2d7e96a39954c65380253ce30bbb7969d3aa847ce4d509fecc"
GOLDEN_ROOT = "b4b7996bceb37c8cb1506433d2ae6b4ca4244b5c56fba0a4974df3552f04e24d"
GOLDEN_KEYS = [
    "5c17fa9c48634172ef03fb3edef965bfb6f60ad47a9d4534ee6a276d847e4355",
    "9814f27b7a7869c24987f01740dd8f4748fe444e1b05b9a735c5c1a69deae0cc",
    "41e5a54f41ddd7770ba6e2ce946fcc7026d35b623a2fdf0b43200d605044a54c",
]

key = st.binary(min_size=keys.KEY_BYTES, max_size=keys.KEY_BYTES)
packed_tokens = st.integers(0, 200).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))


def test_names_are_pinned_by_golden_vectors() -> None:
    assert SALT.hex() == GOLDEN_SALT
    assert ROOT.hex() == GOLDEN_ROOT
    assert [k.hex() for k in keys.chain_keys(ROOT, TOKENS)] == GOLDEN_KEYS


@settings(max_examples=200, deadline=None)
@given(key, packed_tokens)
def test_native_paths_equal_the_reference(parent: bytes, packed: bytes) -> None:
    reference = b"".join(keys.chain_keys_reference(parent, packed))
    assert _native.chain_keys(parent, packed) == reference
    assert _native.chain_keys_portable(parent, packed) == reference


def test_a_partial_last_block_has_no_key() -> None:
    assert len(keys.chain_keys(ROOT, range(15))) == 0
    assert keys.chain_keys(ROOT, range(33)) == keys.chain_keys(ROOT, range(32))


def test_a_chain_can_be_continued_from_any_block() -> None:
    whole = keys.chain_keys(ROOT, TOKENS)
    assert keys.chain_keys(whole[0], TOKENS[16:]) == whole[1:]


def test_every_input_changes_the_key() -> None:
    names = {
        keys.chain_keys(ROOT, TOKENS[:16])[0],
        keys.chain_keys(ROOT, [*TOKENS[:15], 0])[0],
        keys.chain_keys(keys.root_key("00" * 31 + "02", SALT), TOKENS[:16])[0],
        keys.chain_keys(keys.root_key(CONTENT_DIGEST, bytes(32)), TOKENS[:16])[0],
    }
    salts = {
        keys.tenant_salt(b"secret", "b"),
        keys.tenant_salt(b"other", "b"),
        keys.tenant_salt(b"secret", "b", version=2),
    }
    assert len(names) == 4
    assert len(salts) == 3


def test_a_parent_that_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="parent has 31 bytes"):
        keys.chain_keys(bytes(31), TOKENS)


def test_token_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OverflowError):
        keys.chain_keys(ROOT, [-1] * 16)


def test_without_a_compiler_keys_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_chain_keys_native", None)
    assert [k.hex() for k in keys.chain_keys(ROOT, TOKENS)] == GOLDEN_KEYS


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_dingocache_77_keys_do_not_depend_on_the_hash_seed(seed: str | None) -> None:
    """https://github.com/dingodb/DingoCache/pull/77: salted hash() as a key, 0 % hits."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environ["PYTHONHASHSEED"] = seed
    program = (
        "from paceline.core import keys\n"
        f"root = keys.root_key({CONTENT_DIGEST!r}, keys.tenant_salt(b'secret', 'tenant-a'))\n"
        f"print(*[key.hex() for key in keys.chain_keys(root, {TOKENS!r})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == GOLDEN_KEYS


def test_tensorrt_llm_18156_gateway_and_engine_name_blocks_alike() -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/issues/18156: one side drops the adapter, or salts
    otherwise, and nothing ever matches. Adapters go into the content digest; the engine hashes what
    was computed so far, piece by piece."""
    chance = random.Random(0)
    seen = set()
    for _ in range(1000):
        tokens = [chance.randrange(32000) for _ in range(chance.randrange(16, 200))]
        model = ModelInfo(content_digest=chance.randbytes(32).hex())
        salt = keys.tenant_salt(b"s" * 16, f"tenant {chance.randrange(5)}")
        if chance.random() < 0.5:
            salt = keys.narrowed_salt(salt, f"cache {chance.randrange(5)}")
        prompt = _hashed(tokens, model, salt)
        spec = SimpleNamespace(root_key=prompt.root_key, priority=0)
        group: Any = SimpleNamespace(spec=spec, arrival=0)
        sequence = Sequence(group, 0, np.array(tokens), len(tokens))
        for num_blocks in sorted(chance.choices(range(len(tokens) // 16 + 1), k=3)):
            sequence.extend_keys(num_blocks)
        sequence.extend_keys(len(tokens) // 16)
        assert b"".join(sequence.keys) == prompt.block_keys
        seen.add(prompt.block_keys[:32])
    assert len(seen) == 1000


def test_self_test_passes_here_and_fails_on_a_different_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/dingodb/DingoCache/pull/77: a known vector fails the pod at startup."""
    keys.self_test()
    monkeypatch.setattr(keys, "_KEY_TAG", b"pl-key-2")
    monkeypatch.setattr(keys, "_chain_keys_native", None)
    with pytest.raises(EngineFailure, match="block keys differ"):
        keys.self_test()
