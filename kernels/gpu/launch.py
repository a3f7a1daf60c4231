"""What launches need to know of the device."""

import functools

import torch
import triton
import triton.language as tl

_INTERPRETED_PROCESSORS = 2  # enough for a test to see work shared out


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """First in a short kernel that is launched with `overlap`: the one behind it may be set up, and
    the launch before it is over. Any other kernel starts when those before it have ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(p_rows, num_bytes):
    """Calls memory from each of `p_rows` on into the cache; all are multiples of 16 bytes."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [p_rows.to(tl.uint64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Options of a launch that is set up while the one before it still runs (programmatic
    dependent launch, Hopper and later)."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(size: int, least: int = 16) -> int:
    """The next one, from `least` on: blocks have such sizes, products none below 16."""
    return max(least, 1 << (size - 1).bit_length())
