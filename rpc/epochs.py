"""How often a request may go from a gateway to a router, as a whole or in part: its epochs; and
what goes with it.

The attempts of an epoch are numbered from epoch x ATTEMPTS_PER_EPOCH on, in 32 bits, so that no
hand-off of an older epoch is taken for one of this.
"""

MAX_EPOCH = (1 << 12) - 1
ATTEMPTS_PER_EPOCH = 1 << 20
MAX_LOST_WORKERS = 16  # on which it ran, the latest ones
