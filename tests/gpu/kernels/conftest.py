"""Kernels run on the card where there is one, else on the CPU under Triton's interpreter.

The interpreter is slow, and so are tests under it. Without Triton each module is skipped as it is
imported."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def interpreter_on_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter computes with numpy. An exp that overflows is what kernels count on, and
    from numpy 2.4 on the interpreter of Triton 3.6 cannot take its arrays for bounds of loops."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
    with np.errstate(over="ignore", invalid="ignore"):
        yield
