"""Whole rows of a matrix, or many of its numbers, copied by one thread.

torch shares a large copy out among threads and waits for all of them. Where other processes hold
their cores, the wait costs a hundred times the copy.
"""

from typing import Any

import torch
from numpy.typing import NDArray

from paceline.kernels.transfer import to_device


def take_rows(x: torch.Tensor, rows: NDArray[Any]) -> torch.Tensor:
    """x [R, size] → a copy of the rows with these numbers, [len(rows), size]."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy()[rows])
    return x[to_device(x.device, rows)[0]]


def put_rows(x: torch.Tensor, rows: NDArray[Any], values: torch.Tensor) -> None:
    """Writes `values` [len(rows), size] over the rows with these numbers."""
    if x.device.type == "cpu":
        x.numpy()[rows] = values.numpy()
    else:
        x[to_device(x.device, rows)[0]] = values


def fill(x: torch.Tensor, value: float) -> None:
    if x.device.type == "cpu":
        x.numpy().fill(value)
    else:
        x.fill_(value)


def take_numbers(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if flat.device.type == "cpu":
        return torch.from_numpy(flat.numpy()[places.numpy()])
    return flat[places]


def put_numbers(flat: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    if flat.device.type == "cpu":
        flat.numpy()[places.numpy()] = values.numpy()
    else:
        flat[places] = values
