"""The engine over a small random Llama on a device: tokens of the CPU, graphs equal to eager."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_llama import layer_shapes, other_shapes
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Submit
from paceline.engine.pools import PageSums, allocate_pools, pool_memory
from paceline.kernels.quantized import round_rows
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.unit.engine.benches import Bench, prompt, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 96, 512, 3, 4, 2
NUM_PAGES = 200
SPECS = {
    slot: request(prompt(30 + 17 * slot, slot), max_tokens=40, ignore_eos=True, **sampling)
    for slot, sampling in enumerate(
        [{}, {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9}, {"n": 3}]
    )
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_llama(path, HIDDEN, HEADS, INNER)
    return path


def write_llama(path: Path, hidden: int, num_heads: int, inner: int, family: str = "Llama") -> None:
    """Random weights, always the same. `family` may be Qwen3: with norms of heads."""
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": hidden // num_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = other_shapes(config)
    for layer in range(LAYERS):
        shapes |= layer_shapes(config, layer)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.5 / hidden**0.5
        for name, shape in shapes.items()
    }
    if family == "Qwen3":
        names = [f"model.layers.{i}.self_attn.{x}_norm.weight" for i in range(LAYERS) for x in "qk"]
        shape = (len(names), hidden // num_heads)
        tensors |= dict(zip(names, 0.5 + torch.rand(shape, generator=generator), strict=True))
    save_file(tensors, path / "model.safetensors")


def engine(model: Model, device: str, cuda_graphs: bool = True, **changes: bool) -> Bench:
    pools = allocate_pools(model.layout, NUM_PAGES, device)
    memory = pool_memory(pools[0]) if device == "cpu" else None
    config = EngineConfig(max_batch_tokens=64, max_running=12, cuda_graphs=cuda_graphs, **changes)
    return Bench(Engine(model, config, pools, memory))


def streams(b: Bench) -> dict[tuple[int, int], list[int]]:
    b.handle(*(Submit(slot, spec) for slot, spec in SPECS.items())).run()
    b.assert_idle()
    return {(slot, c): b.tokens(slot, c) for slot, spec in SPECS.items() for c in spec.choices}


def test_tokens_equal_those_of_the_cpu_with_and_without_graphs(folder: Path) -> None:
    expected = streams(engine(load_model(folder).model, "cpu"))
    model = load_model(folder, device="cuda").model
    assert streams(engine(model, "cuda", cuda_graphs=False)) == expected
    graphs = engine(model, "cuda")
    assert streams(graphs) == expected
    assert streams(engine(model, "cuda", overlap=False)) == expected
    assert graphs.engine.runner.graphs is not None
    assert len(graphs.engine.runner.graphs.captured) >= 2


def test_a_quantised_model_runs_with_graphs(folder: Path) -> None:
    """Rows are rounded inside of the graph. Prompts and streams are short: where rounding hits an
    edge, the numbers of a padded batch may differ from those of an eager one."""
    model = load_model(folder, device="cuda", quantization="int8").model
    found = []
    for cuda_graphs in (False, True):
        b = engine(model, "cuda", cuda_graphs)
        b.handle(*(Submit(i, request(prompt(9, i), max_tokens=6)) for i in range(3))).run()
        found.append([b.tokens(i) for i in range(3)])
    assert b.engine.runner.graphs is not None and b.engine.runner.graphs.captured
    assert found[0] == found[1]


def test_rows_are_rounded_in_a_graph_as_outside() -> None:
    generator = torch.Generator().manual_seed(7)
    x, other = torch.randn(2, 3, 70, generator=generator).cuda()
    round_rows(x)  # what torch loads when it is first used has no place in a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounded = round_rows(x)
    x.copy_(other)
    graph.replay()
    assert torch.equal(rounded, round_rows(other))


def test_a_replayed_step_equals_an_eager_one(folder: Path) -> None:
    model = load_model(folder, device="cuda").model
    b = engine(model, "cuda", overlap=False)
    b.handle(*(Submit(slot, SPECS[slot]) for slot in (0, 1)))
    while b.engine.state.computed[:2].min() < 60:
        b.step()
    runner, plan = b.engine.runner, b.engine.scheduler.plan()
    assert plan is not None and runner.graphs is not None and not plan.chunks
    with torch.inference_mode():
        eager = model.forward(runner.batch(plan, runner.arrays(plan)), runner.pools)
        replayed = runner.forward(runner.prepare(plan)).logits
        torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-4)


def test_nothing_is_compiled_after_the_warm_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    b = engine(load_model(folder, device="cuda").model, "cuda")
    told: list[tuple[int, int]] = []
    b.engine.warm_up(lambda done, total: told.append((done, total)))
    assert told == [(i + 1, len(told)) for i in range(len(told))]
    graphs = b.engine.runner.graphs
    assert graphs is not None and set(graphs.captured) == set(graphs.all_rungs())
    compiled: list[str] = []

    def note(*, repr: str, **others: object) -> None:
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    streams(b)
    assert not compiled
    assert set(graphs.captured) == set(graphs.all_rungs())


def test_checksums_of_device_pages_equal_those_of_their_bytes(folder: Path) -> None:
    b = engine(load_model(folder, device="cuda").model, "cuda")
    b.handle(Submit(0, SPECS[0])).run()
    named = [i for i, page in enumerate(b.engine.pool.pages) if page.key is not None]
    copy = b.engine.runner.pools[0].cpu()
    sums = PageSums(copy, pool_memory(copy), b.engine.runner.model.layout.page)
    assert sums(named) == [b.engine.pool.pages[i].checksums for i in named]
