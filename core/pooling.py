"""How the hidden states of a prompt become one vector."""

from enum import StrEnum


class Pooling(StrEnum):
    """Names of the public APIs."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all
