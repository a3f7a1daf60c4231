"""What a step has drawn, stored into pinned memory of the host by a kernel.

A copy by the copy engine takes as long to begin as a small kernel to run, and there would be two.
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import overlap, wait_for_previous

_BLOCK = 256


@triton.jit(do_not_specialize=["num"])
def _store_kernel(
    token_ids, best, host_ids, host_best, num, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num
    tl.store(host_ids + o_x, tl.load(token_ids + o_x, mask=m_x), mask=m_x)
    tl.store(host_best + o_x, tl.load(best + o_x, mask=m_x), mask=m_x)


def draws_to_host(token_ids: torch.Tensor, best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of kernels/transfer.py. Who lets go of the copies before the kernel has run loses memory to
    it: a step holds them until it has ended."""
    pinned = token_ids.is_cuda
    host_ids, host_best = (
        torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in (token_ids, best)
    )
    num = len(token_ids)
    _store_kernel[(triton.cdiv(num, _BLOCK),)](
        *(token_ids, best, host_ids, host_best, num),
        BLOCK=_BLOCK,
        **overlap(token_ids.device),
        num_warps=2,
    )
    return host_ids, host_best
