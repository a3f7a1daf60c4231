"""Attention of chunks against its definition: cached context, odd sizes, memory full of NaN."""

import pytest
import torch

from paceline.core.kv_layout import PageGroup
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
) -> None:
    if group.dtype == "bfloat16" and device.type == "cpu":
        pytest.skip("the interpreter multiplies no bfloat16")
    state = filled(group, spans, device, window)
    dtype = state.pool.dtype
    num_rows = sum(query_len for query_len, _ in spans)
    query = torch.randn(num_rows, num_heads + 2, group.head_dim).to(device, dtype)[:, :num_heads]
    out = torch.full(query.shape, float("nan"), dtype=dtype, device=device)
    gpu.attend_chunks(
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
