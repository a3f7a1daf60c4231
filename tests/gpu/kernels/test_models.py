"""Every family computed by the kernels gives the logits of the CPU's own code."""

from pathlib import Path

import pytest
import torch

from paceline.kernels import backend, native
from paceline.models.loader import load_model
from tests.support.computing import logits
from tests.support.tiny_families import TINY_WRITERS

pytest.importorskip("triton")
TOKENS = [(5 * i * i + i) % 64 for i in range(40)]
WAY = "mixed batch"
INTERPRETED = ("llama", "gpt2", "phi3", "gemma3")  # the interpreter takes seconds for each


@pytest.mark.parametrize("family", TINY_WRITERS)
def test_logits(
    tmp_path: Path, device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu" and family not in INTERPRETED:
        pytest.skip("on the card only")
    folder = TINY_WRITERS[family](tmp_path)
    expected = logits(load_model(folder).model, TOKENS, WAY)
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(backend, "uses_triton", lambda tensor: True)
    found = logits(load_model(folder, str(device)).model, TOKENS, WAY, str(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2e-3)
