"""Rotary position embedding, in place on the packed query and key heads.

    angle[t, i] = position[t] · inv_freq[i]
    (a, b) → (a·cos − b·sin, b·cos + a·sin)   for a = x[i], b = x[i + dim / 2]

Angles are made for the tokens of a step, not kept in a table: no memory grows with the context.
"""

import torch

from paceline.kernels import backend, native


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) as `rotate_` takes them, each [T, 1, dim]; sin carries the sign of its half."""
    if backend.uses_triton(positions):  # which rotate in float32
        from paceline.kernels.gpu import rope as gpu

        return gpu.rope_tables(positions, inv_freq, scaling)
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    both = torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)[:, None]
    return both[..., : 2 * inv_freq.shape[0]], both[..., 2 * inv_freq.shape[0] :]


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `heads` [T, H, dim] (a view of the qkv product, say) by the tables of its tokens."""
    num_tokens, num_heads, dim = heads.shape
    if native.takes(heads) and native.takes(cos) and heads.numel():
        return rotate_cpu_(heads, cos, sin)
    swapped = heads.view(num_tokens, num_heads, 2, dim // 2).flip(2).flatten(2)
    heads.mul_(cos).addcmul_(swapped, sin)


def rotate_cpu_(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, level: int | None = None
) -> None:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    assert heads.stride(2) == cos.stride(2) == sin.stride(2) == 1
    native.module.rotate(
        native.flat(heads),
        native.flat(cos),
        native.flat(sin),
        *heads.shape,
        *heads.stride()[:2],
        cos.stride(0),
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )


def rotate_reference(
    heads: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The definition, head dimension by head dimension."""
    rotated = heads.clone()
    half = inv_freq.shape[0]
    for i in range(half):
        angle = positions[:, None].double() * inv_freq[i].double()
        a, b = heads[:, :, i].double(), heads[:, :, i + half].double()
        rotated[:, :, i] = scaling * (a * angle.cos() - b * angle.sin())
        rotated[:, :, i + half] = scaling * (b * angle.cos() + a * angle.sin())
    return rotated
