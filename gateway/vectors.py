"""Pooled hidden states as callers get them: cut to so many dimensions, then of length 1."""

import base64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidRequest

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class VectorForm:
    num_dimensions: int  # the first ones
    is_normalized: bool

    def shape(self, packed: bytes) -> Vector:
        """`packed`: float32, little-endian, of all dimensions. A vector of zeros stays as it is."""
        vector = np.frombuffer(packed, "<f4")[: self.num_dimensions]
        if not self.is_normalized:
            return vector
        length = np.linalg.norm(vector.astype(np.float64))
        return (vector / length).astype(np.float32) if length > 0 else vector


def vector_form(dimensions: int | None, hidden_size: int, normalize: bool | None) -> VectorForm:
    """None: the default. Raises InvalidRequest."""
    count = hidden_size if dimensions is None else dimensions
    reason = f"must lie between 1 and the {hidden_size} that the model has"
    InvalidRequest.check("dimensions", count, 1 <= count <= hidden_size, reason)
    return VectorForm(count, normalize is not False)


def to_base64(vector: Vector) -> str:
    """Of its float32 numbers, little-endian, as OpenAI writes them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
