"""Decode steps whose launches are fused, and prompts through the kernels for Hopper, against the
ordinary ones: the same numbers within rounding, the same tokens eager and as graphs."""

import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Submit
from paceline.engine.pools import allocate_pools
from paceline.kernels import backend
from paceline.models import mlp
from paceline.models.base import ForwardBatch, PrefillChunk
from paceline.models.decoder import Decoder
from paceline.models.loader import load_model
from tests.gpu.test_engine_llama import write_llama
from tests.unit.engine.benches import Bench, prompt, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not backend.is_hopper(torch.device("cuda")), reason="needs a Hopper device"),
]
VOCAB = 512


SHAPES = [(64, 16, "Llama"), (512, 128, "Llama"), (256, 64, "Qwen3")]


@pytest.fixture(scope="module", params=SHAPES, ids=["heads of 16", "of 128", "norms of heads"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    hidden, head_dim, family = request.param
    path = tmp_path_factory.mktemp("llama")
    write_llama(path, hidden, hidden // head_dim, hidden * 2, family)
    loaded = load_model(path, device="cuda", dtype="bfloat16").model
    assert isinstance(loaded, Decoder) and loaded._fused is not None
    return loaded


def decode_batch(contexts: list[int], num_pages: int) -> ForwardBatch:
    device = torch.device("cuda")
    lens = torch.tensor(contexts, device=device)
    width = -(-max(contexts) // PAGE_TOKENS)
    pages = torch.randperm(num_pages, device=device)[: len(contexts) * width]
    table = pages.view(len(contexts), width)
    last = lens - 1
    rows = torch.arange(len(contexts) + 1, device=device)
    return ForwardBatch(
        token_ids=torch.randint(0, VOCAB, (len(contexts),), device=device),
        positions=last,
        slot_mappings=(table[rows[:-1], last // PAGE_TOKENS] * PAGE_TOKENS + last % PAGE_TOKENS,),
        query_start=rows,
        context_lens=lens,
        block_tables=(table,),
        logits_rows=rows[:-1],
        max_query_len=1,
        max_context_len=max(contexts),
        prefills=(),
        wants_last_rows=True,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 17, 33, 64, 100, 128])
@torch.inference_mode()
def test_logits_are_those_of_separate_launches(
    model: Decoder, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = decode_batch([1 + 31 * i % 90 for i in range(num_rows)], 1024)
    pool = torch.full((1024, *model.layout.page.shape), float("nan"), dtype=torch.bfloat16)
    pool[batch.block_tables[0].cpu().flatten()] = torch.randn(
        batch.block_tables[0].numel(), *model.layout.page.shape
    ).bfloat16()
    pools = [pool.cuda() for _ in range(2)]
    fused = model.forward(batch, (pools[0],))
    monkeypatch.setitem(model.__dict__, "_fused", None)
    separate = model.forward(batch, (pools[1],))
    assert fused.isfinite().all() and fused.dtype == torch.float32
    assert error(fused, separate) < 0.02
    slots = batch.slot_mappings[0]
    new = [x[slots // PAGE_TOKENS, :, :, :, slots % PAGE_TOKENS].float() for x in pools]
    assert error(*new) < 0.02
    assert torch.equal(pools[0].isfinite(), pools[1].isfinite()), "nothing else is written"


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def test_prompts_are_those_of_the_other_kernels(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of two prompts, and the last ones alone."""
    device, lengths = torch.device("cuda"), [70, 33]
    starts = torch.tensor([0, 70, 103], device=device)
    table = torch.randperm(16, device=device)[:10].view(2, 5)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    owners = torch.repeat_interleave(torch.arange(2, device=device), starts.diff())
    slots = table[owners, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    ids = torch.randint(0, VOCAB, (103,), device=device)

    def logits(rows: torch.Tensor, wants_last_rows: bool) -> torch.Tensor:
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions,
            slot_mappings=(slots,),
            query_start=starts,
            context_lens=starts.diff(),
            block_tables=(table,),
            logits_rows=rows,
            max_query_len=70,
            max_context_len=0,
            prefills=tuple(PrefillChunk(n, n) for n in lengths),
            wants_last_rows=wants_last_rows,
        )
        shape = (16, *model.layout.page.shape)
        pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        return model.forward(batch, (pool,))

    monkeypatch.setattr(mlp, "MIN_FUSED", 1)
    everything = torch.arange(103, device=device)
    fast, last = logits(everything, False), logits(starts[1:] - 1, True)
    monkeypatch.setattr(backend, "is_hopper", lambda device: False)
    plain = logits(everything, False)
    assert error(fast, plain) < 0.02
    assert error(last, plain[[69, 102]]) < 0.02


@torch.inference_mode()
def test_a_replayed_step_equals_an_eager_one(model: Decoder) -> None:
    config = EngineConfig(max_batch_tokens=64, max_running=16, overlap=False)
    b = Bench(Engine(model, config, allocate_pools(model.layout, 200, "cuda")))
    for slot in range(5):
        b.handle(Submit(slot, request(prompt(20 + 13 * slot, slot), max_tokens=60)))
    while b.engine.state.computed[:5].min() < 40:
        b.step()
    runner, plan = b.engine.runner, b.engine.scheduler.plan()
    assert plan is not None and runner.graphs is not None and not plan.chunks
    eager = model.forward(runner.batch(plan, runner.arrays(plan)), runner.pools)
    assert torch.equal(runner.forward(runner.prepare(plan)).logits, eager)


def test_nothing_is_compiled_after_the_warm_up(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(mlp, "MIN_FUSED", 32)
    config = EngineConfig(max_batch_tokens=64, max_running=12)
    b = Bench(Engine(model, config, allocate_pools(model.layout, 200, "cuda")))
    b.engine.warm_up(lambda done, total: None)
    compiled: list[str] = []

    def note(*, repr: str, **others: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for slot in range(7):
        sampling = {"temperature": float(slot % 2), "seed": slot}
        spec = request(prompt(5 + 17 * slot, slot), max_tokens=20 + 3 * slot, **sampling)
        b.handle(Submit(slot, spec))
    b.run()
    assert not compiled
