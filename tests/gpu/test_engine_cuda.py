"""The engine on a device against the engine on the CPU. Over the mock model any wrong byte of KV,
in an eager step or in a replayed graph, changes a token; with windows, any page that was let go too
early. Families with windows show that kernels read no page that is not there."""

from pathlib import Path

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Emission, RequestSpec, Submit
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.loader import load_model
from tests.support.mock_model import write_mock_model
from tests.support.tiny_families import write_tiny_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_PAGES = 256


WINDOWS = {"num_hidden_layers": 4, "layer_windows": [20, 0, 33, 33]}


def tokens_of(
    folder: Path, device: str, graphs: bool, longest: int = 258
) -> dict[tuple[int, int], list[int]]:
    model = load_model(folder, device).model
    config = EngineConfig(cuda_graphs=graphs, max_batch_tokens=96)
    pools = allocate_pools(model.layout, NUM_PAGES, device)
    memory = pool_memory(pools[0]) if device == "cpu" else None
    engine = Engine(model, config, pools, memory)
    for slot in range(12):
        params = SamplingParams(max_tokens=40, temperature=slot % 2, seed=slot, n=1 + slot % 3)
        prompt = [(slot * 31 + i * 7) % 60 + 2 for i in range(min(5 + 23 * slot, longest))]
        spec = RequestSpec(
            str(slot), prompt, len(prompt), bytes(32), params, tuple(range(params.n))
        )
        engine.handle(Submit(slot, spec))
    outputs: dict[tuple[int, int], list[int]] = {}
    while engine.has_work():
        output = engine.step()
        for event in output.events if output else []:
            if isinstance(event, Emission):
                outputs.setdefault((event.slot, event.choice), []).extend(event.token_ids)
    return outputs


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_tokens_equal_those_of_the_cpu(
    tmp_path: Path, changes: dict[str, object], graphs: bool
) -> None:
    write_mock_model(tmp_path, **changes)
    assert tokens_of(tmp_path, "cuda", graphs) == tokens_of(tmp_path, "cpu", False)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_families_with_windows(tmp_path: Path, family: str, graphs: bool) -> None:
    write_tiny_family(family, tmp_path)
    assert tokens_of(tmp_path, "cuda", graphs, 80) == tokens_of(tmp_path, "cpu", False, 80)
