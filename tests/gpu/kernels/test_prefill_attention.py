"""Attention of chunks against its definition: cached context, odd sizes, memory full of NaN."""

from collections.abc import Callable

import pytest
import torch

from paceline.core.kv_layout import PageGroup
from paceline.kernels import backend
from paceline.kernels.attention import paged_attention_reference
from tests.gpu.kernels.pools import Spans, filled

gpu = pytest.importorskip("paceline.kernels.gpu.prefill_attention")
LAYER, SCALE = 1, 0.3
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def compare(
    device: torch.device,
    group: PageGroup,
    num_heads: int,
    spans: Spans,
    window: int = 0,
    softcap: float = 0.0,
    attend: Callable[..., None] = gpu.attend_chunks,
) -> None:
    if group.dtype == "bfloat16" and device.type == "cpu":
        pytest.skip("the interpreter multiplies no bfloat16")
    state = filled(group, spans, device, window)
    dtype = state.pool.dtype
    num_rows = sum(query_len for query_len, _ in spans)
    query = torch.randn(num_rows, num_heads + 2, group.head_dim).to(device, dtype)[:, :num_heads]
    out = torch.full(query.shape, float("nan"), dtype=dtype, device=device)
    attend(
        *(query, out, state.pool, LAYER, state.block_table, state.context_lens),
        *(state.query_start, max(query_len for query_len, _ in spans)),
        *(window, SCALE, softcap),
    )
    expected = paged_attention_reference(
        query.float().cpu(), state.pool.float().cpu(), LAYER, state.tables, spans, SCALE,
        window, softcap,
    )  # fmt: skip
    tolerance = TOLERANCE[group.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 5, 17, 40, 100])
@pytest.mark.parametrize(
    "spans", [[(1, 1)], [(50, 50)], [(5, 37), (16, 16), (1, 40)], [(2, 130), (33, 70)]]
)
def test_equals_the_definition(
    device: torch.device, spans: Spans, window: int, softcap: float
) -> None:
    compare(device, PageGroup("full", 3, 2, 8), 6, spans, window, softcap)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (2, 2, 96), (40, 1, 16), (4, 1, 256)]
)
def test_shapes_of_heads(
    device: torch.device, num_heads: int, num_kv_heads: int, dim: int, dtype: str
) -> None:
    group = PageGroup("full", 2, num_kv_heads, dim, dtype)
    compare(device, group, num_heads, [(20, 90), (7, 7)])


def needs_hopper(device: torch.device) -> None:
    if not backend.is_hopper(device):
        pytest.skip("the interpreter knows no wgmma")


LONG = [
    [(1, 1)],
    [(50, 50)],
    [(5, 37), (16, 16), (1, 40)],
    [(2, 130), (33, 70)],
    [(300, 300)],
    [(129, 129), (40, 400)],
    [(128, 128)],
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (2, 2), (16, 1)])
@pytest.mark.parametrize("spans", LONG)
def test_the_kernel_for_hopper(
    device: torch.device, spans: Spans, num_heads: int, num_kv_heads: int, dtype: str
) -> None:
    needs_hopper(device)
    from paceline.kernels.gpu import hopper_attention

    group = PageGroup("full", 3, num_kv_heads, 128, dtype)

    def attend(*args: object) -> None:
        *arrays, window, scale, softcap = args
        assert hopper_attention.fits(arrays[0], arrays[2], window, softcap)  # type: ignore[arg-type]
        hopper_attention.attend_chunks(*arrays, scale)  # type: ignore[arg-type]

    compare(device, group, num_heads, spans, attend=attend)


def test_the_kernel_for_hopper_on_a_long_prompt(device: torch.device) -> None:
    """Against the other kernel; the definition would take minutes."""
    needs_hopper(device)
    from paceline.kernels.gpu import hopper_attention

    spans = [(700, 3000), (1500, 1500), (1, 2000)]
    state = filled(PageGroup("full", 2, 2, 128, "bfloat16"), spans, device)
    query = torch.randn(2201, 8, 128, device=device, dtype=torch.bfloat16)
    arrays = (state.block_table, state.context_lens, state.query_start, 1500)
    expected, found = torch.empty_like(query), torch.full_like(query, float("nan"))
    gpu.attend_chunks(query, expected, state.pool, LAYER, *arrays, 0, SCALE, 0.0)
    hopper_attention.attend_chunks(query, found, state.pool, LAYER, *arrays, SCALE)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
