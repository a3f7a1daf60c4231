"""Products of few rows with a large weight on Hopper, read at the rate of the memory: x @ weight.

A program takes some outputs and a part of `in`. One warp fetches tiles by the bulk copy engine into
a ring: those of the weight, which depends on no launch before, even while those still run. What a
program has summed up goes to parts[split], and who reads a product next adds the parts up: a launch
less.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.gpu.launch import power_of_two

MAX_ROWS = 128
PARTS, WHOLE, GATED = range(3)
NO_ACT = -1  # or SILU, GELU_TANH of kernels/gate.py
# By kind and rows: outputs and depth of a tile, stages of the ring, warps that multiply, programs
# that fit a multiprocessor.
_TILES = {
    PARTS: {
        16: (128, 64, 5, 4, 2),
        32: (64, 64, 8, 4, 2),
        64: (128, 64, 8, 8, 1),
        128: (64, 128, 4, 4, 1),
    },
    WHOLE: {
        16: (128, 64, 5, 4, 2),
        32: (128, 64, 5, 4, 2),
        64: (128, 64, 8, 8, 1),
        128: (256, 64, 4, 8, 1),
    },
    GATED: {
        16: (64, 64, 6, 4, 2),
        32: (64, 64, 5, 4, 2),
        64: (64, 64, 4, 4, 2),
        128: (128, 64, 4, 8, 1),
    },
}
_PROCESSORS = 132  # of an H100 or H200; sums do not depend on which card it is
_MIN_STEPS = 4  # of a split


@dataclass(frozen=True, slots=True)
class Tiling:
    outputs: int
    depth: int
    splits: int
    stages: int
    warps: int  # that multiply
    max_registers: int  # of a thread: how many programs fit a multiprocessor


@gluon.jit
def _fetch_weight(desc, ring, barrier, stage, i_n, k, second, ACT: gl.constexpr):
    if ACT >= 0:
        tma.async_copy_global_to_shared(desc, [k, i_n], barrier, ring.index(2 * stage))
        tma.async_copy_global_to_shared(desc, [k, second + i_n], barrier, ring.index(2 * stage + 1))
    else:
        tma.async_copy_global_to_shared(desc, [k, i_n], barrier, ring.index(stage))


@gluon.jit
def _produce(
    x_desc,
    weight_desc,
    x_ring,
    weight_ring,
    full,
    empty,
    i_n,
    begin,
    steps,
    second,
    ACT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    TILES: gl.constexpr = 2 if ACT >= 0 else 1
    BYTES: gl.constexpr = x_desc.block_type.nbytes + TILES * weight_desc.block_type.nbytes
    first = gl.minimum(steps, STAGES)
    for i in range(first):
        k = begin + i * BLOCK_K
        mbarrier.expect(full.index(i), BYTES)
        _fetch_weight(weight_desc, weight_ring, full.index(i), i, i_n, k, second, ACT)
    gdc_wait()
    for i in range(first):
        k = begin + i * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [0, k], full.index(i), x_ring.index(i))
    for i in range(first, steps):
        stage = i % STAGES
        k = begin + i * BLOCK_K
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_weight(weight_desc, weight_ring, full.index(stage), stage, i_n, k, second, ACT)
        tma.async_copy_global_to_shared(x_desc, [0, k], full.index(stage), x_ring.index(stage))


@gluon.jit
def _consume(
    out,
    x_ring,
    weight_ring,
    full,
    empty,
    num_rows,
    num_outputs,
    i_n,
    split,
    steps,
    ACT: gl.constexpr,
    ROUNDED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    dtype: gl.constexpr = x_ring.dtype
    b_o = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    b_up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        b_x = x_ring.index(stage).permute((1, 0))
        if ACT >= 0:
            gate = weight_ring.index(2 * stage).permute((1, 0))
            up = weight_ring.index(2 * stage + 1).permute((1, 0))
            b_o = warpgroup_mma(gate, b_x, b_o, is_async=True)
            b_up = warpgroup_mma(up, b_x, b_up, is_async=True)
            b_o, b_up = warpgroup_mma_wait(2, deps=(b_o, b_up))
        else:
            weight = weight_ring.index(stage).permute((1, 0))
            b_o = warpgroup_mma(weight, b_x, b_o, is_async=True)
            b_o = warpgroup_mma_wait(1, deps=(b_o,))
        if i > 0:
            mbarrier.arrive(empty.index((i - 1) % STAGES))
    gdc_launch_dependents()
    gdc_wait()  # long over, as x has come; what is stored below may have been read before
    if ACT >= 0:
        b_o, b_up = warpgroup_mma_wait(0, deps=(b_o, b_up))
        # What two products would have stored.
        b_o = b_o.to(dtype).to(gl.float32)
        b_up = b_up.to(dtype).to(gl.float32)
        if ACT == 0:
            b_o = b_o / (1 + gl.exp(-b_o))
        else:
            z = 0.7978845608028654 * (b_o + 0.044715 * b_o * b_o * b_o)
            b_o = b_o / (1 + gl.exp(-2 * z))
        b_o = b_o * b_up
    else:
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
    if ROUNDED:
        b_o = b_o.to(dtype)
    b_o = b_o.to(out.dtype.element_ty)
    o_n = i_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    p_out = out + (split.to(gl.int64) * num_rows + o_m)[None, :] * num_outputs + o_n[:, None]
    gl.store(p_out, b_o, mask=(o_m < num_rows)[None, :] & (o_n < num_outputs)[:, None])


@gluon.jit(do_not_specialize=["num_rows", "steps"])
def _product_kernel(
    x_desc,
    weight_desc,
    out,
    num_rows,
    num_outputs,
    depth,
    steps,
    ACT: gl.constexpr,
    ROUNDED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """With ACT `num_outputs` is half of the weight's columns: act(first half) · second half."""
    TILES: gl.constexpr = 2 if ACT >= 0 else 1
    i_n = gl.program_id(0) * BLOCK_N
    split = gl.program_id(1)
    begin = split * steps * BLOCK_K
    own_steps = gl.minimum(steps, (depth - begin + BLOCK_K - 1) // BLOCK_K)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(
        x_desc.dtype, [TILES * STAGES, BLOCK_K, BLOCK_N], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (out, x_ring, weight_ring, full, empty, num_rows, num_outputs, i_n, split,
                        own_steps, ACT, ROUNDED, BLOCK_M, BLOCK_N, STAGES, WARPS)),
            (_produce, (x_desc, weight_desc, x_ring, weight_ring, full, empty, i_n, begin,
                        own_steps, num_outputs, ACT, BLOCK_K, STAGES)),
        ],
        [1],
        [24],
    )
    # fmt: on


def tiling(num_rows: int, num_outputs: int, depth: int, kind: int) -> Tiling:
    """`kind`: PARTS, WHOLE or GATED. As measured on an H200 for Llama-8B: docs/performance.md."""
    outputs, step, stages, warps, programs = _TILES[kind][power_of_two(num_rows)]
    splits = 1
    if kind == PARTS:
        num_tiles = triton.cdiv(num_outputs, outputs)
        splits = min(programs * _PROCESSORS // num_tiles, depth // (_MIN_STEPS * step))
        splits = max(1, min(splits, 4 if num_rows <= 16 else 2))
    return Tiling(outputs, step, splits, stages, warps, 128 if programs == 2 else 168)


def parts(x: torch.Tensor, weight: torch.Tensor, tiles: Tiling | None = None) -> torch.Tensor:
    """x [T, in] and weight [in, out], dense → what adds up to the product: [splits, T, out]
    float32"""
    num_rows, (depth, num_outputs) = len(x), weight.shape
    t = tiles or tiling(num_rows, num_outputs, depth, PARTS)
    out = torch.empty((t.splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, t, NO_ACT, False)
    return out


def rounded(x: torch.Tensor, weight: torch.Tensor, tiles: Tiling | None = None) -> torch.Tensor:
    """The product rounded to the type of x, as float32 [T, out]."""
    num_rows, (depth, num_outputs) = len(x), weight.shape
    t = tiles or tiling(num_rows, num_outputs, depth, WHOLE)
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, t, NO_ACT, True)
    return out


def gated(
    x: torch.Tensor, weight: torch.Tensor, act: int, tiles: Tiling | None = None
) -> torch.Tensor:
    """act(x @ gate) · (x @ up) for gate and up [in, inner] side by side → [T, inner]"""
    num_rows, depth = x.shape
    inner = weight.shape[1] // 2
    t = tiles or tiling(num_rows, inner, depth, GATED)
    out = torch.empty((num_rows, inner), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, t, act, False)
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, t: Tiling, act: int, is_rounded: bool
) -> None:
    num_rows, depth = x.shape
    num_outputs = out.shape[-1]
    dtype = getattr(gl, str(x.dtype).removeprefix("torch."))
    tiles = [(x, [power_of_two(num_rows), t.depth]), (weight, [t.depth, t.outputs])]
    layouts = [gl.NVMMASharedLayout.get_default_for(shape, dtype) for _, shape in tiles]
    descriptors = [
        TensorDescriptor.from_tensor(tensor, shape, layout)
        for (tensor, shape), layout in zip(tiles, layouts, strict=True)
    ]
    _product_kernel[triton.cdiv(num_outputs, t.outputs), t.splits](
        *(*descriptors, out, num_rows, num_outputs, depth),
        triton.cdiv(triton.cdiv(depth, t.depth), t.splits),
        ACT=act,
        ROUNDED=is_rounded,
        BLOCK_M=power_of_two(num_rows),
        BLOCK_N=t.outputs,
        BLOCK_K=t.depth,
        STAGES=t.stages,
        WARPS=t.warps,
        num_warps=t.warps,
        maxnreg=t.max_registers,
        launch_pdl=True,
    )
