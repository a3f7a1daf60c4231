"""The engine over a small random Llama gives what transformers gives, however it is scheduled."""

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from paceline.engine.messages import Submit
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.transformers_models import logits_of, save_random_model
from tests.unit.engine.benches import alone, bench, prompt, request
from tests.unit.engine.hand_overs import hand_over

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=1,
)
MAX_TOKENS = 24
PROMPTS = [prompt(num, num) for num in (1, 16, 33, 70)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    reference = save_random_model(folder, CONFIG)
    return load_model(folder).model, reference


@pytest.fixture(scope="module")
def greedy(models: tuple[Model, PreTrainedModel]) -> list[list[int]]:
    """What transformers continues each prompt with."""
    outputs = []
    for tokens in PROMPTS:
        sequence = list(tokens)
        for _ in range(MAX_TOKENS):
            sequence.append(int(logits_of(models[1], sequence)[-1].argmax()))
        outputs.append(sequence[len(tokens) :])
    return outputs


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_batch_tokens": 9},
        {"num_pages": 9, "output_window_tokens": 0},  # forces preemption
        {"prefix_cache": False, "max_running": 2},
    ],
)
def test_greedy_tokens_equal_those_of_transformers(
    models: tuple[Model, PreTrainedModel], greedy: list[list[int]], config: dict[str, int]
) -> None:
    b = bench(models[0], **config)
    for slot, tokens in enumerate(PROMPTS * 2):
        spec = request(tokens, max_tokens=MAX_TOKENS, ignore_eos=True)
        b.handle(Submit(slot, spec))
    b.run()
    assert [b.tokens(slot) for slot in range(len(PROMPTS) * 2)] == greedy * 2
    if "num_pages" in config:
        assert b.engine.scheduler.num_preemptions > 0
    b.assert_idle()


@pytest.mark.parametrize("slot", range(len(PROMPTS)))
def test_split_equals_transformers(
    models: tuple[Model, PreTrainedModel], greedy: list[list[int]], slot: int
) -> None:
    source, reader = bench(models[0], max_batch_tokens=24), bench(models[0])
    spec = request(PROMPTS[slot], max_tokens=MAX_TOKENS, ignore_eos=True)
    hand_over(source, reader, spec, slot)
    assert source.tokens(slot) + reader.tokens(slot) == greedy[slot]
    source.assert_idle()
    reader.assert_idle()


def test_seeded_draws_survive_batching_and_preemption(
    models: tuple[Model, PreTrainedModel],
) -> None:
    kinds = [{}, {"top_k": 20}, {"top_p": 0.9}, {"n": 2, "temperature": 0.7}]
    specs = {
        slot: request(tokens, ignore_eos=True, **({"temperature": 1.0, "seed": slot} | kind))
        for slot, (tokens, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    }
    b = bench(models[0], num_pages=9, output_window_tokens=0)
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    for slot, spec in specs.items():
        for choice, expected in alone(spec, models[0]).items():
            assert b.tokens(slot, choice) == expected
    b.assert_idle()


def test_logprobs_equal_those_of_transformers(models: tuple[Model, PreTrainedModel]) -> None:
    spec = request(PROMPTS[2], max_tokens=4, num_logprobs=3, temperature=0.5, seed=1)
    b = bench(models[0]).handle(Submit(1, spec)).run()
    sequence = list(PROMPTS[2])
    for emission in b.events:
        for position in getattr(emission, "logprobs", ()):
            expected = torch.log_softmax(logits_of(models[1], sequence)[-1], dim=0)
            assert position.logprob == pytest.approx(expected[position.token_id].item(), abs=1e-4)
            best = expected.topk(3)
            assert [token for token, _ in position.top] == best.indices.tolist()
            sequence.append(position.token_id)
    assert len(sequence) == len(PROMPTS[2]) + 4
