"""How much of a step on a CUDA device is prepared ahead: nothing, for debugging, up to all."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    kernels: str  # of kernels/backend.py
    cuda_graphs: bool  # pure decode steps are captured at the start and replayed
    overlap: bool | None  # a step is launched while another runs; None: unless on the CPU


LEVELS = {
    "O0": Level("torch", cuda_graphs=False, overlap=False),
    "O1": Level("auto", cuda_graphs=False, overlap=False),
    "O2": Level("auto", cuda_graphs=True, overlap=False),
    "O3": Level("auto", cuda_graphs=True, overlap=None),
}
