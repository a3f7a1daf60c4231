"""Products of many rows with gate and up, and their gated activation, on Hopper: what lies between
never reaches memory.

A program takes tiles of 128 rows and 128 outputs, one after the other. One warp fetches rows of x
and columns of gate and up by the bulk copy engine, two groups of four warps take half of the rows
each. Tiles that share rows or columns are taken at about the same time.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels.gpu.launch import num_processors

_ROWS, _OUTPUTS, _DEPTH, _STAGES = 128, 128, 64, 4
_TOGETHER = 16  # tiles of rows


@gluon.jit
def _place(tile, num_row_tiles, num_tiles, TOGETHER: gl.constexpr):
    """Tiles of TOGETHER rows column by column, then those of the next rows."""
    per_band = TOGETHER * (num_tiles // num_row_tiles)
    first = tile // per_band * TOGETHER
    height = gl.minimum(num_row_tiles - first, TOGETHER)
    return first + tile % per_band % height, tile % per_band // height


@gluon.jit
def _produce(
    x_desc,
    weight_desc,
    x_ring,
    weight_ring,
    full,
    empty,
    num_row_tiles,
    num_tiles,
    num_outputs,
    steps,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    DEPTH: gl.constexpr = weight_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = weight_desc.block_type.shape[1]
    BYTES: gl.constexpr = x_desc.block_type.nbytes + 2 * weight_desc.block_type.nbytes
    t = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, i_n = _place(tile, num_row_tiles, num_tiles, TOGETHER)
        for step in range(steps):
            stage = t % STAGES
            k = step * DEPTH
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((t // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BYTES)
            tma.async_copy_global_to_shared(x_desc, [i_m * ROWS, k], barrier, x_ring.index(stage))
            tma.async_copy_global_to_shared(
                weight_desc, [k, i_n * OUTPUTS], barrier, weight_ring.index(2 * stage)
            )
            tma.async_copy_global_to_shared(
                weight_desc,
                [k, num_outputs + i_n * OUTPUTS],
                barrier,
                weight_ring.index(2 * stage + 1),
            )
            t += 1


@gluon.jit
def _gated(b_gate, b_up, dtype: gl.constexpr, ACT: gl.constexpr):
    """Of what two products would have stored."""
    b_gate = b_gate.to(dtype).to(gl.float32)
    b_up = b_up.to(dtype).to(gl.float32)
    if ACT == 0:
        b_act = b_gate / (1 + gl.exp(-b_gate))
    else:
        z = 0.7978845608028654 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_act = b_gate / (1 + gl.exp(-2 * z))
    return (b_act * b_up).to(dtype)


@gluon.jit
def _consume(
    part: gl.constexpr,
    out_desc,
    x_tiles,
    weight_tiles,
    results,
    full,
    empty,
    num_row_tiles,
    num_tiles,
    steps,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
):
    HALF: gl.constexpr = out_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = out_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTPUTS, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    result = results.index(part)
    t = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, i_n = _place(tile, num_row_tiles, num_tiles, TOGETHER)
        b_both = gl.zeros([HALF, 2 * OUTPUTS], gl.float32, layout)
        for step in range(steps):
            stage = t % STAGES
            mbarrier.wait(full.index(stage), (t // STAGES) & 1)
            b_x = x_tiles.index(2 * stage + part)
            b_both = warpgroup_mma(b_x, weight_tiles.index(stage), b_both, is_async=True)
            b_both = warpgroup_mma_wait(1, deps=(b_both,))
            if step > 0:
                mbarrier.arrive(empty.index((t - 1) % STAGES))
            t += 1
        b_both = warpgroup_mma_wait(0, deps=(b_both,))
        mbarrier.arrive(empty.index((t - 1) % STAGES))
        b_gate, b_up = b_both.reshape([HALF, 2, OUTPUTS]).permute([0, 2, 1]).split()
        b_gate = gl.convert_layout(b_gate, half, assert_trivial=True)
        b_up = gl.convert_layout(b_up, half, assert_trivial=True)
        b_y = _gated(b_gate, b_up, result.dtype, ACT)
        tma.store_wait(0)
        result.store(b_y)
        fence_async_shared()
        row = i_m * (2 * HALF) + part * HALF
        tma.async_copy_shared_to_global(out_desc, [row, i_n * OUTPUTS], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_row_tiles", "num_tiles"])
def _product_kernel(
    x_desc,
    weight_desc,
    out_desc,
    num_row_tiles,
    num_tiles,
    num_outputs,
    steps,
    ACT: gl.constexpr,
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    DEPTH: gl.constexpr = weight_desc.block_type.shape[0]
    OUTPUTS: gl.constexpr = weight_desc.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], x_desc.layout)
    x_tiles = x_ring._reinterpret(dtype, [2 * STAGES, ROWS // 2, DEPTH], x_desc.layout)
    weights: gl.constexpr = [2 * STAGES, DEPTH, OUTPUTS]
    weight_ring = gl.allocate_shared_memory(dtype, weights, weight_desc.layout)
    # Gate and up lie one behind the other, blocks of 128 bytes a row: they are one tile.
    both: gl.constexpr = [STAGES, DEPTH, 2 * OUTPUTS]
    weight_tiles = weight_ring._reinterpret(dtype, both, weight_desc.layout)
    results = gl.allocate_shared_memory(dtype, [2, ROWS // 2, OUTPUTS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (ZERO, out_desc, x_tiles, weight_tiles, results, full, empty, num_row_tiles,
                        num_tiles, steps, TOGETHER, STAGES, ACT)),
            (_consume, (ONE, out_desc, x_tiles, weight_tiles, results, full, empty, num_row_tiles,
                        num_tiles, steps, TOGETHER, STAGES, ACT)),
            (_produce, (x_desc, weight_desc, x_ring, weight_ring, full, empty, num_row_tiles,
                        num_tiles, num_outputs, steps, TOGETHER, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on


def gated(x: torch.Tensor, weight: torch.Tensor, act: int) -> torch.Tensor:
    """act(x @ gate) · (x @ up) for x [T, in] and gate and up [in, inner] side by side, all dense,
    rows of multiples of 16 bytes → [T, inner]"""
    num_rows, depth = x.shape
    inner = weight.shape[1] // 2
    out = torch.empty((num_rows, inner), dtype=x.dtype, device=x.device)
    dtype = getattr(gl, str(x.dtype).removeprefix("torch."))

    def described(tensor: torch.Tensor, shape: list[int]) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
        return TensorDescriptor.from_tensor(tensor, shape, layout)

    num_row_tiles = triton.cdiv(num_rows, _ROWS)
    num_tiles = num_row_tiles * triton.cdiv(inner, _OUTPUTS)
    _product_kernel[(min(num_tiles, num_processors(x.device)),)](
        described(x, [_ROWS, _DEPTH]),
        described(weight, [_DEPTH, _OUTPUTS]),
        described(out, [_ROWS // 2, _OUTPUTS]),
        *(num_row_tiles, num_tiles, inner, triton.cdiv(depth, _DEPTH)),
        ACT=act,
        TOGETHER=_TOGETHER,
        STAGES=_STAGES,
        num_warps=4,
    )
    return out


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    is_dense = x.is_contiguous() and weight.is_contiguous()
    return is_half and is_dense and x.shape[1] % 8 == 0 and weight.shape[1] % 16 == 0
