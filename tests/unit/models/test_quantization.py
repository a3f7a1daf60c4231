"""Weights rounded on load and from GPTQ and AWQ checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.kernels.product import PackedMatrix
from paceline.kernels.quantized import PackedQuantizedMatrix, ReorderedMatrix
from paceline.models.decoder import Decoder
from paceline.models.loader import load_model
from paceline.models.quantization import SETTINGS
from paceline.models.transformer import TransformerBlock
from paceline.worker.config import QUANTIZATIONS
from tests.support.computing import WAYS, logits
from tests.support.fake_router import Attachment
from tests.support.quantized_checkpoints import LAYERS, VOCAB, Form, write_checkpoint, write_floats
from tests.support.tiny_families import write_tiny_family
from tests.support.tiny_models import write_tiny_gpt2, write_tiny_llama
from tests.support.workers import start_worker

TOKENS = [(7 * i + i * i) % 48 for i in range(60)]
FORMS = [
    Form("gptq"),
    Form("gptq", symmetric=True),
    Form("gptq", sorted_inputs=True, config={"desc_act": True}),
    Form("gptq", group_size=64, sorted_inputs=True),
    Form("gptq", group_size=-1),
    Form("gptq", bits=8),
    Form("gptq", bits=8, symmetric=True, group_size=64),
    Form("gptq", config={"checkpoint_format": "gptq_v2"}),
    Form("gptq", bits=8, config={"checkpoint_format": "gptq_v2"}),
    Form("awq", config={"version": "GEMM", "zero_point": True}),
    Form("awq", group_size=64, symmetric=True),
    Form("awq", group_size=-1),
]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("setting", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_rounded_models_are_near_and_agree_with_themselves(
    tmp_path: Path, setting: str, most: float, tied: bool
) -> None:
    write_floats(tmp_path, Form("gptq", bits=8), tied)
    expected = logits(load_model(tmp_path).model, TOKENS, "whole")
    model = load_model(tmp_path, quantization=setting).model
    found = [logits(model, TOKENS, way) for way in WAYS]
    assert 0 < relative_error(found[0], expected) < most
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_weights_take_less_memory(tmp_path: Path, setting: str) -> None:
    write_tiny_llama(tmp_path, tie_word_embeddings=False)
    plain, rounded = (load_model(tmp_path, quantization=q).model for q in ("auto", setting))
    assert rounded.weight_bytes() < 0.35 * plain.weight_bytes()
    assert isinstance(rounded, Decoder)
    assert isinstance(rounded.head.matrix, PackedQuantizedMatrix)
    assert rounded.head.matrix.bits == 8


def test_gpt_2_is_rounded_too(tmp_path: Path) -> None:
    write_tiny_gpt2(tmp_path)
    expected, found = (
        logits(load_model(tmp_path, quantization=q).model, TOKENS, "whole")
        for q in ("auto", "int8")
    )
    assert 0 < relative_error(found, expected) < 0.03


def test_the_router_of_experts_stays_float(tmp_path: Path) -> None:
    model = load_model(write_tiny_family("mixtral", tmp_path), quantization="int4").model
    block: Any = model.blocks[0]  # type: ignore[attr-defined]
    assert isinstance(block.mlp.router.matrix, PackedMatrix)
    assert isinstance(block.mlp.experts[0].down.matrix, PackedQuantizedMatrix)


def test_the_content_digest_follows_the_quantization(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    digests = [load_model(tmp_path, quantization=q).content_digest for q in SETTINGS]
    assert len(set(digests)) == len(SETTINGS)
    write_checkpoint(tmp_path / "gptq", Form("gptq"))
    first = load_model(tmp_path / "gptq").content_digest
    change_config(tmp_path / "gptq", checkpoint_format="gptq_v2")  # the same files
    assert load_model(tmp_path / "gptq").content_digest != first


async def test_a_worker_rounds_and_says_so_in_its_digest(tmp_path: Path) -> None:
    assert set(QUANTIZATIONS) == set(SETTINGS)
    write_tiny_llama(tmp_path)
    worker = start_worker("decode", tmp_path, quantization="int8")
    try:
        worker.wait_until_ready()
        async with Attachment(worker.endpoint) as router:
            digest = router.info.content_digest
    finally:
        assert worker.stop() == 0
    assert digest == load_model(tmp_path, quantization="int8").content_digest


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_checkpoints_stand_for_what_their_format_says(tmp_path: Path, form: Form) -> None:
    floats = write_checkpoint(tmp_path / "quantized", form)
    write_floats(tmp_path / "floats", form)
    model = load_model(tmp_path / "quantized").model
    assert isinstance(model, Decoder)
    for i, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        mlp: Any = block.mlp
        layers = (block.attention.qkv, block.out, mlp.gate_up, mlp.down)
        held = torch.cat([columns(layer.matrix) for layer in layers[:3:2]])
        joined = torch.cat([floats[f"model.layers.{i}.{part}"] for part in JOINED])
        assert torch.equal(held, joined)
        for layer, part in ((layers[1], "self_attn.o_proj"), (layers[3], "mlp.down_proj")):
            assert torch.equal(columns(layer.matrix), floats[f"model.layers.{i}.{part}"])
        assert isinstance(mlp.down.matrix, ReorderedMatrix) == form.sorted_inputs
    expected = logits(load_model(tmp_path / "floats").model, TOKENS, "whole")
    assert 0 < relative_error(logits(model, TOKENS, "whole"), expected) < 0.05


JOINED = [part for part in LAYERS if part.split(".")[1] not in ("o_proj", "down_proj")]


def columns(matrix: Any) -> torch.Tensor:
    inner = matrix.matrix if isinstance(matrix, ReorderedMatrix) else matrix
    found: torch.Tensor = matrix.columns(torch.arange(inner.num_columns))
    return found


def change_config(folder: Path, **changes: Any) -> None:
    """Of quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Names have __ for each point; None removes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "quantization_config.bits"),
        ("gptq", {"group_size": 48}, "quantization_config.group_size"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"group_size": 64}, "qzeros"),
        ("awq", {"bits": 8}, "quantization_config.bits"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"quant_method": "fp8"}, "quant_method"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(
    tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path, Form(method))
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_tensors_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__k_proj"
    other = torch.arange(VOCAB + 16, dtype=torch.int32).flip(0) // 32
    bias = torch.ones(128)
    for changes, message in (
        ({f"{name}__qweight": None}, r"k_proj\.qweight.*missing"),
        ({f"{name}__g_idx": other}, r"k_proj\.g_idx.*differs from that of"),
        ({f"{name}__g_idx": other * 0}, r"k_proj\.g_idx.*each group 32 times"),
        ({"model__layers__0__mlp__up_proj__bias": bias}, r"up_proj\.bias.*not zero"),
    ):
        write_checkpoint(tmp_path, Form("gptq"))
        change_tensors(tmp_path, **changes)
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path)


def test_a_bias_of_zeros_that_some_writers_add_changes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Form("gptq"))
    expected = logits(load_model(tmp_path).model, TOKENS, "whole")
    change_tensors(tmp_path, model__layers__0__mlp__up_proj__bias=torch.zeros(128))
    assert torch.equal(logits(load_model(tmp_path).model, TOKENS, "whole"), expected)


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Form("awq"))
    with pytest.raises(ConfigError, match="quantization=.*int8.*quantized already"):
        load_model(tmp_path, quantization="int8")
    with pytest.raises(ConfigError, match="quantization.*must be one of"):
        load_model(write_tiny_llama(tmp_path / "other"), quantization="int3")
