"""Workers whose steps are prepared less and less give the tokens of one whose steps are ready."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.worker.levels import LEVELS
from tests.support.fake_router import make_request
from tests.support.tiny_families import write_tiny_family
from tests.support.worker_pair import Workers, workers_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOWER = [level for level in LEVELS if level != "O3"]
SETTINGS: dict[str, object] = {"device": "cuda", "dtype": "float32", "pool_mib": 64}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Workers]:
    """A decode worker for each level; the prefill worker has the default."""
    write_tiny_family("qwen3", tmp_path)
    decodes = {level: {**SETTINGS, "level": level} for level in SLOWER}
    yield from workers_on(tmp_path, decodes, SETTINGS)


async def test_tokens_are_the_same(deployment: Workers) -> None:
    prompt = [random.Random(1).randrange(2, 60) for _ in range(77)]
    for level in SLOWER:
        async with deployment.attached(level) as pair:
            request = make_request(pair.decode.info, prompt, max_tokens=30, ignore_eos=True)
            found = await pair.decode.run(request).until_ended()
            expected = await pair.prefill.run(request).until_ended()
        assert found.output() == expected.output() and len(found.output()) == 30
