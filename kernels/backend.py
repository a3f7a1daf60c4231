"""Who computes on a CUDA device: Triton's kernels or torch. Chosen here, once a process.

Every operation in this package has a torch path, which also runs where Triton does not; a module
asks `uses_triton` and imports its kernel from `paceline.kernels.gpu` only then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import structlog

from paceline.core.errors import ConfigError

if TYPE_CHECKING:  # a process that only copies pages never loads torch
    import torch

BACKENDS = ("auto", "triton", "torch")
_OLDEST = (8, 0)  # compute capability with matrix units for bfloat16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Choice:
    name: str  # triton or torch
    reason: str


_wanted = "auto"


def select(wanted: str, device: torch.device) -> Choice:
    """For the whole process, which computes on `device`, a CUDA device. Raises ConfigError for
    what cannot be had."""
    global _wanted
    choice = choose(wanted, device)
    if choice.name != wanted:
        log.info("kernels chosen", kernels=choice.name, reason=choice.reason)
    _wanted = wanted
    return choice


@functools.cache
def choose(wanted: str, device: torch.device) -> Choice:
    ConfigError.check("kernels", wanted, wanted in BACKENDS, f"must be one of {BACKENDS}")
    if wanted == "torch":
        return Choice("torch", "asked for")
    problem = _problem(device)
    if wanted == "triton":
        ConfigError.check("kernels", wanted, not problem, problem)
        return Choice("triton", "asked for")
    # On an H200 a decode step of SmolLM2-135M takes a third of the time: docs/performance.md.
    return Choice("torch", problem) if problem else Choice("triton", "faster in every measurement")


def uses_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and choose(_wanted, tensor.device).name == "triton"


def takes_rows(x: torch.Tensor) -> bool:
    """Whether Triton's kernels take x [rows, size]: float32, some numbers, rows dense."""
    import torch

    is_dense = x.dtype == torch.float32 and x.stride(1) == 1 and x.numel() > 0
    return is_dense and uses_triton(x)


def is_hopper(device: torch.device) -> bool:
    """Whether Triton's kernels for Hopper run there."""
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if choose(_wanted, device).name != "triton":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def _problem(device: torch.device) -> str:
    """Why Triton cannot be used there; empty when it can."""
    import torch

    if find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _OLDEST else f"compute capability {capability} is below {_OLDEST}"
