"""Who computes on a CUDA device: decided without one."""

from collections.abc import Iterator

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.kernels import backend

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "_wanted", "auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    backend.choose.cache_clear()
    yield
    backend.choose.cache_clear()


def test_auto_takes_triton_where_it_runs() -> None:
    assert backend.select("auto", DEVICE).name == "triton"


def test_auto_says_why_it_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert backend.choose("auto", DEVICE) == backend.Choice(
        "torch", "compute capability (7, 5) is below (8, 0)"
    )
    backend.choose.cache_clear()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend.choose("auto", DEVICE) == backend.Choice("torch", "triton is not installed")
    with pytest.raises(ConfigError, match="kernels.*triton is not installed"):
        backend.select("triton", DEVICE)


def test_what_is_asked_for_is_taken() -> None:
    assert backend.select("torch", DEVICE).name == "torch"
    assert backend.select("triton", DEVICE).name == "triton"
    with pytest.raises(ConfigError, match="fast"):
        backend.select("fast", DEVICE)


def test_the_device_that_computes_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one, which may be another kind."""
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: capabilities[at.index])
    chosen = [backend.choose("auto", torch.device("cuda", index)).name for index in capabilities]
    assert chosen == ["torch", "triton"]
    assert backend.select("triton", torch.device("cuda:1")).name == "triton"
    with pytest.raises(ConfigError, match=r"kernels.*\(7, 5\) is below"):
        backend.select("triton", torch.device("cuda:0"))


def test_tensors_on_the_cpu_never_use_it() -> None:
    assert not backend.uses_triton(torch.zeros(2))
