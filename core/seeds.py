"""Seeds of single choices.

A draw's noise is a function of mix(mix(mix(seed) + choice) + position), see engine/noise.py. `mix`
is a bijection, so each choice of a request is choice 0 of a request with another seed.
"""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64 (Steele, Lea, Flood 2014)
_SHIFTS = (30, 27, 31)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed with which a request for one choice gives what choice `choice` of a request with
    `seed` is. Both have 64 bits, without a sign."""
    return _unmix(_mix(seed) + choice & _MASK)


def _mix(x: int) -> int:
    x = x + _GOLDEN & _MASK
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> _SHIFTS[-1]


def _unmix(x: int) -> int:
    x = _unshift(x, _SHIFTS[-1])
    for shift, factor in zip(_SHIFTS[1::-1], _FACTORS[::-1], strict=True):
        x = _unshift(x * pow(factor, -1, 2**64) & _MASK, shift)
    return x - _GOLDEN & _MASK


def _unshift(x: int, shift: int) -> int:
    """The y of which x is y ^ y >> shift."""
    return x ^ x >> shift ^ x >> 2 * shift
