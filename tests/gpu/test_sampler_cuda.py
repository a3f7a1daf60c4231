"""The whole sampler on a device gives the tokens and scores of the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.logit_edits import LogitEdits
from paceline.engine.sampler import SampleBatch, Sampled, collect, sample
from tests.unit.engine.benches import EDITED
from tests.unit.engine.sequences import VOCAB, sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM = 600


def batch(sampling: list[dict[str, Any]], with_edits: bool) -> SampleBatch:
    def column(name: str, default: float, dtype: type) -> Any:
        return np.array([s.get(name, default) for s in sampling], dtype)

    sequences = [sequence([5, 6, 7], [5, 20, 9, i % 50], **s) for i, s in enumerate(sampling)]
    return SampleBatch(
        rows=np.arange(NUM),
        temperature=column("temperature", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        typical_p=column("typical_p", 1.0, np.float32),
        seed=np.arange(NUM) * 31,
        choice=np.arange(NUM) % 3,
        position=np.arange(NUM) % 40,
        num_logprobs=np.arange(NUM) % 7 - 1,
        edits=LogitEdits(enumerate(sequences)) if with_edits else None,
    )


def on(device: str, logits: torch.Tensor, samples: SampleBatch) -> Sampled:
    drawn = sample(logits.to(device), samples)
    torch.cuda.synchronize()
    return collect(drawn, samples)


@pytest.mark.parametrize("with_edits", [False, True])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_equals_the_cpu(spread: float, with_edits: bool) -> None:
    options = [{}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.8}, {"typical_p": 0.7}, EDITED]
    samples = batch([options[i % len(options)] for i in range(NUM)], with_edits)
    logits = torch.randn(NUM, VOCAB, generator=torch.Generator().manual_seed(3)) * spread
    found, expected = on("cuda", logits, samples), on("cpu", logits, samples)
    assert found.token_ids == expected.token_ids
    for score, wanted in zip(found.logprobs, expected.logprobs, strict=True):
        assert (score is None) == (wanted is None)
        if score is not None and wanted is not None:
            assert score.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert score.rank == wanted.rank
            assert [v for _, v in score.top] == pytest.approx([v for _, v in wanted.top], abs=1e-4)
