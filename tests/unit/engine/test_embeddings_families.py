"""Embeddings of every family equal those of transformers' last hidden state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline.core.pooling import Pooling
from paceline.engine.messages import Embedding, Submit
from paceline.models.loader import load_model
from tests.support.families import FAMILIES
from tests.support.small_configs import GPT2, LLAMA
from tests.support.transformers_models import save_random_model
from tests.unit.engine.benches import alone, bench, request

TOKENS = [(i * i * 7 + 3 * i) % 88 for i in range(80)]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "gpt2": ("GPT2Config", GPT2),
} | {name: (family.config_class, family.config("default")) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("family", CONFIGS)
def test_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    """In one piece; in chunks beside a stream; behind a prefix from the cache."""
    config_class, config = CONFIGS[family]
    theirs = save_random_model(tmp_path, getattr(transformers, config_class)(**config))
    with torch.inference_mode():
        states = theirs.base_model(torch.tensor([TOKENS]), use_cache=False).last_hidden_state[0]
    expected = {Pooling.LAST: states[-1].numpy(), Pooling.MEAN: states.mean(dim=0).numpy()}
    model = load_model(tmp_path).model
    stream = request(TOKENS[40:], max_tokens=12, ignore_eos=True)
    streamed = alone(stream, model)[0]
    for pooling, wanted in expected.items():
        spec = request(TOKENS, pooling=pooling)
        whole = bench(model, 128, max_batch_tokens=128).handle(Submit(1, spec)).run()
        chunked = bench(model, 128, max_batch_tokens=24).handle(Submit(0, stream))
        chunked.step()
        chunked.handle(Submit(1, spec)).run()
        assert chunked.tokens(0) == streamed
        whole.handle(Submit(2, spec)).run()
        assert whole.of(Embedding, 2)[0].num_cached_tokens == (64 if pooling is Pooling.LAST else 0)
        for b, slot in ((whole, 1), (chunked, 1), (whole, 2)):
            np.testing.assert_allclose(b.vector(slot), wanted, rtol=0, atol=1e-4)
            b.assert_idle()
