"""Decode attention against its definition: lengths about the edges of items, memory full of NaN."""

import pytest
import torch

from paceline.core.kv_layout import PageGroup
from paceline.kernels import backend
from paceline.kernels.attention import paged_attention_reference
from tests.gpu.kernels.pools import filled

gpu = pytest.importorskip("paceline.kernels.gpu.decode_attention")
LAYER, SCALE = 1, 0.3
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def compare(
    device: torch.device,
    group: PageGroup,
    num_heads: int,
    contexts: list[int],
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    if group.dtype == "bfloat16" and device.type == "cpu":
        pytest.skip("the interpreter multiplies no bfloat16")
    spans = [(1, context) for context in contexts]
    state = filled(group, spans, device, window)
    dtype = state.pool.dtype
    wide = torch.randn(len(spans), num_heads + 2, group.head_dim).to(device, dtype)
    query = wide[:, :num_heads]
    out = torch.full(query.shape, float("nan"), dtype=dtype, device=device)
    plan = gpu.plan_items(state.context_lens, max(contexts) + 40, group.num_heads, window)
    gpu.attend_decodes(
        *(query, out, state.pool, LAYER, state.block_table, state.context_lens),
        *(plan, SCALE, softcap),
    )
    expected = paged_attention_reference(
        query.float().cpu(), state.pool.float().cpu(), LAYER, state.tables, spans, SCALE,
        window, softcap,
    )  # fmt: skip
    tolerance = TOLERANCE[group.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 5, 17, 130])
@pytest.mark.parametrize("contexts", [[1], [17, 1, 64, 33], [128, 129, 127, 300, 16]])
def test_equals_the_definition(
    device: torch.device, contexts: list[int], window: int, softcap: float
) -> None:
    compare(device, PageGroup("full", 3, 2, 8), 6, contexts, window, softcap)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (2, 2, 96), (17, 1, 16), (4, 1, 256)]
)
def test_shapes_of_heads(
    device: torch.device, num_heads: int, num_kv_heads: int, dim: int, dtype: str
) -> None:
    compare(device, PageGroup("full", 2, num_kv_heads, dim, dtype), num_heads, [40, 150])


def test_a_long_context_has_no_more_items_than_can_be_merged(device: torch.device) -> None:
    contexts = [gpu.MAX_SPLITS * 64 + 70, 3]  # 2118: items of 128
    compare(device, PageGroup("full", 2, 1, 8), 2, contexts)
    lens = torch.tensor(contexts, device=device)
    plan = gpu.plan_items(lens, 1 << 17, 1, 0)
    assert plan.starts.tolist() == [0, 17, 18]


def test_long_items_come_first(device: torch.device) -> None:
    """Of sequences in turn, and their items side by side."""
    lens = torch.tensor([64, 300, 20, 300], device=device)  # items of 64, 192, 64 and 192
    plan = gpu.plan_items(lens, 300, 8, 0)
    assert plan.starts.tolist() == [0, 1, 3, 4, 6]
    order = plan.order[:, :6].tolist()
    assert order[0] == [1, 1, 3, 3, 0, 2]
    assert order[1] == [0, 192, 0, 192, 0, 0]
    assert order[2] == [192, 300, 192, 300, 64, 20]
    assert order[3] == [2, 4, 8, 10, 1, 7]
    assert plan.queue.tolist() == [0, 0]


def test_programs_share_items_in_every_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer programs than items; what one launch has counted is nothing to the next."""
    monkeypatch.setattr(gpu, "num_processors", lambda device: 1)
    group, contexts = PageGroup("full", 2, 8, 16), [40, 3, 90, 17, 65]
    compare(device, group, 16, contexts)
    state = filled(group, [(1, context) for context in contexts], device)
    query = torch.randn(len(contexts), 16, 16).to(device)
    plan = gpu.plan_items(state.context_lens, 100, 8, 0)
    results = []
    for _ in range(3):
        out = torch.full_like(query, float("nan"))
        arrays = (state.block_table, state.context_lens, plan, SCALE, 0.0)
        gpu.attend_decodes(query, out, state.pool, LAYER, *arrays)
        results.append(out)
    assert plan.queue.tolist() == [0, 0]
    assert results[0].isfinite().all() and all(torch.equal(out, results[0]) for out in results)


def test_many_sequences(device: torch.device) -> None:
    contexts = [1 + 7 * i % 40 for i in range(513)] if device.type == "cuda" else [3] * 40
    compare(device, PageGroup("full", 2, 2, 8), 4, contexts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (8, 8), (16, 1)])
def test_the_kernel_for_hopper(
    device: torch.device, num_heads: int, num_kv_heads: int, dtype: str
) -> None:
    if not backend.is_hopper(device):
        pytest.skip("the interpreter knows no wgmma")
    edges = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1024, 1044, 2048, 2049, 4500]
    contexts = edges + [1 + 37 * i % 150 for i in range(256 // num_kv_heads)]
    compare(device, PageGroup("full", 2, num_kv_heads, 128, dtype), num_heads, contexts)


def test_the_kernel_for_hopper_gives_the_same_each_time(device: torch.device) -> None:
    if not backend.is_hopper(device):
        pytest.skip("the interpreter knows no wgmma")
    state = filled(
        PageGroup("full", 2, 8, 128, "bfloat16"), [(1, 700 + i) for i in range(64)], device
    )
    query = torch.randn(64, 32, 128, device=device, dtype=torch.bfloat16)
    plan = gpu.plan_items(state.context_lens, 800, 8, 0)
    results = []
    for _ in range(20):
        out = torch.full_like(query, float("nan"))
        arrays = (state.block_table, state.context_lens, plan, SCALE, 0.0)
        gpu.attend_decodes(query, out, state.pool, LAYER, *arrays)
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)
