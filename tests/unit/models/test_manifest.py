"""Digests of weights are computed once and follow the content."""

import os
from pathlib import Path

import pytest

from paceline.models import manifest
from paceline.models.loader import load_model
from paceline.models.manifest import MANIFEST_NAME, weights_digest
from tests.support.tiny_models import write_tiny_llama

WEIGHTS = "model.safetensors"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files hashed in full, in order."""
    calls: list[Path] = []
    original = manifest.file_digest

    def counting(path: Path) -> str:
        calls.append(path)
        return original(path)

    monkeypatch.setattr(manifest, "file_digest", counting)
    return calls


def test_a_file_is_hashed_once(tmp_path: Path, hashed: list[Path]) -> None:
    write_tiny_llama(tmp_path)
    first = weights_digest(tmp_path)
    assert (tmp_path / MANIFEST_NAME).exists()
    assert weights_digest(tmp_path) == first
    assert hashed == [tmp_path / WEIGHTS]


def test_a_changed_file_is_hashed_again(tmp_path: Path, hashed: list[Path]) -> None:
    write_tiny_llama(tmp_path)
    first = weights_digest(tmp_path)
    path = tmp_path / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert weights_digest(tmp_path) != first
    assert len(hashed) == 2


def test_a_damaged_manifest_is_made_again(tmp_path: Path, hashed: list[Path]) -> None:
    write_tiny_llama(tmp_path)
    first = weights_digest(tmp_path)
    for damage in ("", "[]", '{"files": 3}', '{"files": {"model.safetensors": null}}'):
        (tmp_path / MANIFEST_NAME).write_text(damage)
        assert weights_digest(tmp_path) == first
    assert len(hashed) == 5


def test_the_manifest_of_a_read_only_folder_lies_in_the_cache(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = write_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (folder / MANIFEST_NAME).mkdir()  # cannot be replaced by a file, whoever runs the test
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    assert len(hashed) == 1
    assert len(list((cache / "paceline" / "manifests").iterdir())) == 1


def test_the_content_digest_follows_weights_config_and_kv_type(tmp_path: Path) -> None:
    digests = [
        load_model(write_tiny_llama(tmp_path / "a")).content_digest,
        load_model(tmp_path / "a", dtype="bfloat16").content_digest,
        load_model(write_tiny_llama(tmp_path / "b", rms_norm_eps=1e-3)).content_digest,
        load_model(write_tiny_llama(tmp_path / "c", tie_word_embeddings=True)).content_digest,
    ]
    assert len(set(digests)) == 4
    assert load_model(write_tiny_llama(tmp_path / "d")).content_digest == digests[0]
