"""Bounds of kernels/token_filter.py in one launch, a program a row, without a sort.

A filter keeps keys (a logit, or how near it is to the mean one) down to a border: the highest key
from which on the weight reaches a limit. Weights are 1 for top_k and masses for the others, as
integers, whose sums do not depend on their order.

    survey    one pass: the highest key of each of BLOCK classes (places modulo BLOCK), all weight
    bracket   the row's border lies at or above the border among these highest keys
    collect   a second pass: the numbers from there on, among which the border is searched for
    narrow    where they do not fit a block: passes that weigh several thresholds, until they do

What is collected for one filter is all that the next one reads. Behind it lie -inf up to a block.
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.token_filter import MIN_TEMPERATURE, Filters

_BLOCK, _WARPS = 4096, 8  # numbers of a pass at a time; as many can be collected
_MAX_REGISTERS = 128  # of a thread: two programs fit a multiprocessor
_FEW_BLOCK = 256  # where there are no more
_NARROW_BLOCK, _THRESHOLDS = 1024, 8
_BRACKET_TURNS, _ALL_TURNS = tl.constexpr(16), tl.constexpr(64)  # at most
_TOP_K, _TOP_P, _TYPICAL_P = (tl.constexpr(i) for i in range(3))
_LEAST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_LEAST_NUMBER = tl.constexpr(torch.finfo(torch.float32).min)
_LEAST_KEY, _HIGHEST_KEY = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
_ONE = tl.constexpr(1 << 40)  # the weight of the largest logit


@triton.jit
def _ordered(b_x):
    """int32 in the order of float32."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def _number(key):
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _load(p_x, o_x, size, low, center, kind, VECTORS: tl.constexpr):
    """Numbers, which of them are kept so far, and their keys."""
    m_x = o_x < size
    if VECTORS:
        m_x = tl.max_constancy(m_x, 4)
    b_x = tl.load(p_x + o_x, mask=m_x, other=-float("inf"))
    m_kept = b_x >= low
    b_key = _ordered(tl.where(kind == _TYPICAL_P, -tl.abs(b_x - center), b_x))
    return b_x, m_kept, tl.where(m_kept, b_key, _LEAST_KEY)


@triton.jit
def _weights(b_x, m_kept, best, inverse, kind):
    b_w = tl.where(kind == _TOP_K, 1.0, tl.exp((b_x - best) * inverse))
    return tl.where(m_kept, b_w, 0.0)


@triton.jit
def _whole(b_w):
    return (b_w.to(tl.float64) * _ONE).to(tl.int64)


@triton.jit
def _survey(
    p_x, size, low, center, best, inverse, kind, VECTORS: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key of each class, the lowest of the row, and its whole weight."""
    b_top = tl.full([BLOCK], _LEAST_KEY, tl.int32)
    b_least = tl.full([BLOCK // 4], _HIGHEST_KEY, tl.int32)
    b_sum = tl.zeros([BLOCK // 4], tl.float32)
    for start in range(0, size, BLOCK):
        b_x, m_kept, b_key = _load(
            p_x, start + tl.arange(0, BLOCK), size, low, center, kind, VECTORS
        )
        b_top = tl.maximum(b_top, b_key)
        b_low = tl.reshape(tl.where(m_kept, b_key, _HIGHEST_KEY), [BLOCK // 4, 4])
        b_least = tl.minimum(b_least, tl.min(b_low, axis=1))
        b_w = _weights(b_x, m_kept, best, inverse, kind)
        b_sum += tl.sum(tl.reshape(b_w, [BLOCK // 4, 4]), axis=1)
    return b_top, tl.min(b_least, axis=0), tl.sum(_whole(b_sum), axis=0)


@triton.jit
def _search(b_key, b_w, begin, end, limit, most_turns):
    """The highest key in [begin, end) from which on the weight reaches `limit`, else `begin`; after
    `most_turns` one not far below. Halves by number and by key in turn, as `_thresholds` does."""
    turn = 0
    while (end - begin > 1) & (turn < most_turns):
        by_number = _ordered(0.5 * _number(begin) + 0.5 * _number(end - 1)).to(tl.int64)
        middle = tl.where(turn % 2 == 0, by_number, (begin + end) >> 1)
        middle = tl.minimum(tl.maximum(middle, begin + 1), end - 1)
        weight = tl.sum(tl.where(b_key >= middle.to(tl.int32), b_w, 0), axis=0)
        is_reached = weight >= limit
        begin, end = tl.where(is_reached, middle, begin), tl.where(is_reached, end, middle)
        turn += 1
    return begin


@triton.jit
def _search_few(
    few,
    low,
    center,
    best,
    inverse,
    kind,
    begin,
    end,
    limit,
    BLOCK: tl.constexpr,
):
    b_x, m_kept, b_key = _load(few, tl.arange(0, BLOCK), BLOCK, low, center, kind, True)
    b_w = _whole(_weights(b_x, m_kept, best, inverse, kind))
    return _search(b_key, b_w, begin, end, limit, _ALL_TURNS)


@triton.jit
def _weight_of_few(few, low, center, best, inverse, kind, BLOCK: tl.constexpr):
    b_x, m_kept, _ = _load(few, tl.arange(0, BLOCK), BLOCK, low, center, kind, True)
    return tl.sum(_whole(_weights(b_x, m_kept, best, inverse, kind)), axis=0)


@triton.jit
def _collect(
    p_x,
    size,
    low,
    center,
    kind,
    begin,
    end,
    few,
    counter,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers with keys in [begin, end) to `few`, where they fit; returns how many there are."""
    o_x = tl.arange(0, BLOCK)
    tl.store(few + o_x, tl.full([BLOCK], -float("inf"), tl.float32))
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        b_x, m_kept, b_key = _load(
            p_x, start + tl.arange(0, BLOCK), size, low, center, kind, VECTORS
        )
        m_found = m_kept & (b_key >= begin.to(tl.int32)) & (b_key < end.to(tl.int32))
        p_counter = counter + tl.zeros([BLOCK], tl.int32)
        o_few = tl.atomic_add(p_counter, 1, mask=m_found, sem="relaxed")
        tl.store(few + o_few, b_x, mask=m_found & (o_few < BLOCK))
    tl.debug_barrier()
    return tl.atomic_add(counter, 0)


@triton.jit
def _thresholds(begin, end, turn, NUM: tl.constexpr):
    """Both, and keys between them evenly by number and by key in turn: the one soon comes near,
    the other comes to an end for any numbers."""
    o_t = tl.arange(0, NUM)
    first, last = _number(begin), _number(end - 1)
    by_number = _ordered(first + (last - first) * (o_t / (NUM - 1.0))).to(tl.int64)
    by_key = begin + (end - begin) * o_t // (NUM - 1)
    b_t = tl.where(turn % 2 == 0, by_number, by_key)
    b_t = tl.minimum(tl.maximum(b_t, begin + 1), end - 1)
    return tl.where(o_t == 0, begin, tl.where(o_t == NUM - 1, end, b_t))


@triton.jit
def _narrow(
    p_x,
    size,
    low,
    center,
    best,
    inverse,
    kind,
    begin,
    end,
    limit,
    turn,
    BLOCK: tl.constexpr,
    NUM: tl.constexpr,
):
    """Nearer bounds of the border, how many numbers lie between, and the weight above."""
    b_t = _thresholds(begin, end, turn, NUM)
    b_weight = tl.zeros([BLOCK, NUM], tl.float32)
    b_count = tl.zeros([BLOCK, NUM], tl.int32)
    for start in range(0, size, BLOCK):
        o_x = start + tl.arange(0, BLOCK)[:, None]
        b_x, m_kept, b_key = _load(p_x, o_x, size, low, center, kind, False)
        b_w = _weights(b_x, m_kept, best, inverse, kind)
        m_above = m_kept & (b_key >= b_t.to(tl.int32)[None, :])
        b_weight += tl.where(m_above, b_w, 0.0)
        b_count += m_above.to(tl.int32)
    b_sum, b_num = tl.sum(_whole(b_weight), axis=0), tl.sum(b_count, axis=0)
    o_t = tl.arange(0, NUM)
    m_reached = (o_t == 0) | ((b_sum >= limit) & (o_t < NUM - 1))
    num = tl.min(tl.where(m_reached, b_num, size), axis=0)
    num -= tl.max(tl.where(m_reached, 0, b_num), axis=0)
    begin = tl.max(tl.where(m_reached, b_t, begin), axis=0)
    end = tl.min(tl.where(m_reached, end, b_t), axis=0)
    return begin, end, num, tl.max(tl.where(m_reached, 0, b_sum), axis=0)


@triton.jit
def _mean(p_x, size, low, best, inverse, temperature, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    """The mean logit: where a token is as surprising as a token is on average."""
    b_mass = tl.zeros([BLOCK], tl.float32)
    b_moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_x, m_kept, _ = _load(p_x, o_x, size, low, 0.0, _TOP_P, VECTORS)
        b_scaled = tl.maximum((b_x - best) * inverse, -87.0)
        b_w = tl.where(m_kept, tl.exp(b_scaled), 0.0)
        b_mass += b_w
        b_moment += b_w * b_scaled
    moment = tl.sum(b_moment.to(tl.float64), axis=0) / tl.sum(b_mass.to(tl.float64), axis=0)
    return (best + temperature * moment).to(tl.float32)


@triton.jit
def _span(p_x, size, low, center, kind, border, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Lowest and highest number whose key reaches the border."""
    b_low = tl.full([BLOCK], float("inf"), tl.float32)
    b_high = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        b_x, m_kept, b_key = _load(
            p_x, start + tl.arange(0, BLOCK), size, low, center, kind, VECTORS
        )
        m_in = m_kept & (b_key >= border)
        b_low = tl.minimum(b_low, tl.where(m_in, b_x, float("inf")))
        b_high = tl.maximum(b_high, tl.where(m_in, b_x, -float("inf")))
    return tl.min(b_low, axis=0), tl.max(b_high, axis=0)


@triton.jit
def _border(
    p_x,
    size,
    low,
    center,
    best,
    inverse,
    kind,
    amount,
    few,
    counter,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    NARROW: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """Of a row longer than a block, and how many numbers `few` holds if they are all from the
    border on; else 0."""
    b_top, least, total = _survey(p_x, size, low, center, best, inverse, kind, VECTORS, BLOCK)
    limit = tl.where(kind == _TOP_K, amount * _ONE, amount * total.to(tl.float64)).to(tl.int64)
    limit = tl.maximum(limit, 1)
    begin, end = least.to(tl.int64), tl.max(b_top, axis=0).to(tl.int64) + 1
    num, turn = size, size * 0
    num_few, above = size * 0, limit * 0
    if limit < total:
        # Of two numbers as far from the mean one the lower weighs less.
        b_number = _number(b_top)
        b_number = tl.where(kind == _TYPICAL_P, center + b_number, b_number)
        b_top_w = _whole(_weights(b_number, b_top > _LEAST_KEY, best, inverse, kind))
        # Where their weight is too little: half of them, from which on most often BLOCK · ln 2
        # numbers lie, as many as fit.
        is_reached = tl.sum(b_top_w, axis=0) >= limit
        b_top_w = tl.where(is_reached, b_top_w, 1)
        bracket = tl.where(is_reached, limit, BLOCK // 2)
        bracket = _search(b_top, b_top_w, begin, end, bracket, _BRACKET_TURNS)
        num = _collect(p_x, size, low, center, kind, bracket, end, few, counter, VECTORS, BLOCK)
        if num <= BLOCK:
            if is_reached == 0:
                above = _weight_of_few(few, low, center, best, inverse, kind, BLOCK)
                is_reached = above >= limit
            num_few = tl.where(is_reached, num, 0)
        if is_reached:
            begin, above = bracket, limit * 0
        elif num <= BLOCK:
            end, num = bracket, size
        while (num > BLOCK) & (end - begin > 1):
            begin, end, num, above = _narrow(
                *(p_x, size, low, center, best, inverse, kind, begin, end, limit, turn),
                *(NARROW, THRESHOLDS),
            )
            turn += 1
            if num <= BLOCK:
                num = _collect(
                    p_x, size, low, center, kind, begin, end, few, counter, VECTORS, BLOCK
                )
        row = (few, low, center, best, inverse, kind, begin, end, limit - above)
        if num <= FEW:
            begin = _search_few(*row, FEW)
        elif num <= BLOCK:
            begin = _search_few(*row, BLOCK)
    return begin, num_few


@triton.jit
def _border_of_few(
    p_x, size, low, center, best, inverse, kind, amount, VECTORS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a row that fits a block."""
    b_x, m_kept, b_key = _load(p_x, tl.arange(0, BLOCK), size, low, center, kind, VECTORS)
    b_w = _whole(_weights(b_x, m_kept, best, inverse, kind))
    total = tl.sum(b_w, axis=0)
    limit = tl.where(kind == _TOP_K, amount * _ONE, amount * total.to(tl.float64)).to(tl.int64)
    begin = tl.min(tl.where(m_kept, b_key, _HIGHEST_KEY), axis=0).to(tl.int64)
    end = tl.max(b_key, axis=0).to(tl.int64) + 1
    if limit < total:
        begin = _search(b_key, b_w, begin, end, tl.maximum(limit, 1), _ALL_TURNS)
    return begin


@triton.jit(do_not_specialize=["row_size"])
def _filter_kernel(
    x,
    bests,
    temperatures,
    min_p,
    top_k,
    top_p,
    typical_p,
    all_few,
    counters,
    lows,
    highs,
    stride,
    row_size,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    NARROW: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(bests + row)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST_TEMPERATURE)
    inverse = 1 / temperature
    low = tl.full([], _LEAST_NUMBER, tl.float32)
    high = tl.full([], float("inf"), tl.float32)
    p_x, size = x + row * stride, tl.full([], row_size, tl.int32)
    few = all_few + row * BLOCK
    if (best > -float("inf")) & (best < float("inf")):
        share = tl.load(min_p + row).to(tl.float64)
        if share > 0:
            bound = best.to(tl.float64) + temperature.to(tl.float64) * tl.log(share)
            low = tl.maximum(low, bound.to(tl.float32))
        num_top = tl.load(top_k + row)
        mass, typical = tl.load(top_p + row), tl.load(typical_p + row)
        for kind in range(3):
            amount = tl.where(kind == _TOP_P, mass, typical).to(tl.float64)
            amount = tl.where(kind == _TOP_K, tl.minimum(num_top, size).to(tl.float64), amount)
            if tl.where(kind == _TOP_K, num_top > 0, amount < 1):
                center = best
                if kind == _TYPICAL_P:
                    center = _mean(p_x, size, low, best, inverse, temperature, VECTORS, BLOCK)
                arguments = (p_x, size, low, center, best, inverse, kind, amount)
                num_few = size * 0
                if size <= FEW:
                    border = _border_of_few(*arguments, VECTORS, FEW)
                elif size <= BLOCK:
                    border = _border_of_few(*arguments, VECTORS, BLOCK)
                else:
                    border, num_few = _border(
                        *arguments, few, counters + row, VECTORS, BLOCK, FEW, NARROW, THRESHOLDS
                    )
                if kind == _TYPICAL_P:
                    low, high = _span(p_x, size, low, center, kind, border, VECTORS, BLOCK)
                else:
                    low = _number(border)
                if num_few > 0:
                    p_x = few
                    size = (num_few + 3) // 4 * 4
    tl.store(lows + row, low)
    tl.store(highs + row, high)


def filter_bounds(
    x: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of kernels/token_filter.py; x [R, size] has dense rows and some numbers."""
    num_rows, size = x.shape
    low, high = torch.empty_like(best), torch.empty_like(best)
    few = torch.empty((num_rows, _BLOCK), dtype=torch.float32, device=x.device)
    counters = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    chosen = (filters.min_p, filters.top_k, filters.top_p, filters.typical_p)
    _filter_kernel[(num_rows,)](
        *(x, best, temperature, *chosen, few, counters, low, high, x.stride(0), size),
        VECTORS=size % 4 == 0 and x.stride(0) % 4 == 0,
        BLOCK=_BLOCK,
        FEW=_FEW_BLOCK,
        NARROW=_NARROW_BLOCK,
        THRESHOLDS=_THRESHOLDS,
        num_warps=_WARPS,
        maxnreg=_MAX_REGISTERS,
    )
    return low, high
