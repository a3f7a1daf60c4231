"""Draws from softmax(x / temperature): the token with the highest x / temperature + noise.

    v     = (top 32 bits of scramble(key + token id · φ) + ½) / 2^32
    noise = -ln(-ln(1 - v))                               standard Gumbel, below 23

`key` stands for one draw. All in float64, so that implementations that round their logarithms
otherwise draw the same tokens; the noise is large where v is small. int64 tensors wrap the same on
CPU and CUDA; `scramble` is the part of splitmix64 (Steele, Lea, Flood 2014) that its top half
depends on.
"""

import torch

from paceline.kernels import backend, native
from paceline.kernels.token_filter import MIN_TEMPERATURE

GOLDEN = -7046029254386353131  # φ: 0x9E3779B97F4A7C15
SCRAMBLE_FACTORS = (-4658895280553007687, -7723592293110705685)
_CANDIDATES = 8  # of a row in float32, judged again in float64
_AT_ONCE_CPU = 1 << 18  # numbers: what stays in the caches of a core
_AT_ONCE_DEVICE = 1 << 24


def gumbel_max(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """x [R, size] float32, its largest, temperature and keys (int64) of each row → ids [R], of
    numbers between `low` and `high`. Of a row without any: some id."""
    if native.takes(x) and x.numel():
        return gumbel_max_cpu(x, best, temperature, low, high, keys)
    if backend.takes_rows(x):
        from paceline.kernels.gpu import gumbel_max as gpu

        return gpu.gumbel_max(x, best, temperature, low, high, keys)
    return gumbel_max_torch(x, best, temperature, low, high, keys)


def gumbel_max_cpu(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    keys: torch.Tensor,
    level: int | None = None,
) -> torch.Tensor:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    ids = torch.empty_like(keys)
    native.module.gumbel_max(
        x.contiguous().numpy(),
        best.numpy(),
        temperature.numpy(),
        low.numpy(),
        high.numpy(),
        keys.numpy(),
        ids.numpy(),
        x.shape[1],
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return ids


def gumbel_max_torch(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """A few rows at once: the noise of all would be large."""
    temperature = temperature.double().clamp(min=MIN_TEMPERATURE)
    at_once = _AT_ONCE_CPU if x.device.type == "cpu" else _AT_ONCE_DEVICE
    num_rows = max(1, at_once // x.shape[1])
    columns = (x, best, temperature, low, high, keys)
    parts = zip(*(torch.split(column, num_rows) for column in columns), strict=True)
    return torch.cat([_draw(*part) for part in parts])


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float64 noise for pairs (key, token id): int64 tensors that broadcast."""
    v = (top_half(keys, token_ids).double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-v)).log()


def top_half(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return scramble(keys + token_ids * GOLDEN) >> 32 & 0xFFFFFFFF


def scramble(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)).mul_(SCRAMBLE_FACTORS[0])
    return (x ^ (x >> 27 & 0x1FFFFFFFFF)).mul_(SCRAMBLE_FACTORS[1])


def _draw(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    ids = torch.arange(x.shape[1], device=x.device)
    noise = _rough_gumbel(keys[:, None], ids)
    scores = noise.add_((x - best[:, None]) / temperature[:, None].float())
    scores.masked_fill_((x < low[:, None]) | (x > high[:, None]), float("-inf"))
    candidates = scores.topk(min(_CANDIDATES, x.shape[1]), dim=1)
    scaled = (x.gather(1, candidates.indices).double() - best.double()[:, None]).div_(
        temperature[:, None]
    )
    exact = gumbel(keys[:, None], candidates.indices).add_(scaled)
    exact.masked_fill_(candidates.values == float("-inf"), float("-inf"))
    is_best = exact == exact.amax(dim=1, keepdim=True)
    return candidates.indices.masked_fill(~is_best, x.shape[1] - 1).amin(dim=1)


def _rough_gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise in float32."""
    v = top_half(keys, token_ids).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
