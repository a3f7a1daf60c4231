"""The mock model: every KV byte decides the next token, chunking does not."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from paceline.core.errors import ConfigError
from paceline.models.base import Model
from paceline.models.loader import LoadedModel, load_model
from tests.support.batches import Sequence, new_pool, run
from tests.support.mock_model import EOS_TOKEN_ID, write_mock_model


def load(folder: Path, **overrides: Any) -> Model:
    return load_model(write_mock_model(folder, **overrides)).model


def generate(model: Model, prompt: list[int], num_tokens: int, chunk: int = 1000) -> list[int]:
    pool = new_pool(model, 64)
    sequence = Sequence(list(range(3, 60)))
    for start in range(0, len(prompt), chunk):
        logits = run(model, pool, [(sequence, prompt[start : start + chunk])])
    tokens = [int(logits[0].argmax())]
    while len(tokens) < num_tokens:
        tokens.append(int(run(model, pool, [(sequence, tokens[-1:])])[0].argmax()))
    return tokens


def test_tokens_do_not_depend_on_how_the_prompt_is_cut(tmp_path: Path) -> None:
    model = load(tmp_path)
    prompt = [(7 * i) % 256 for i in range(100)]
    whole = generate(model, prompt, 30)
    assert whole == generate(model, prompt, 30, chunk=13)
    assert whole != generate(model, [*prompt[:-1], 1], 30)
    assert len(set(whole)) > 20
    assert EOS_TOKEN_ID not in whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_wrong_byte_or_order_changes_the_logits(tmp_path: Path, dtype: str) -> None:
    model = load_model(write_mock_model(tmp_path), dtype=dtype).model
    prompt = [(11 * i) % 256 for i in range(48)]

    def after(damage: Any) -> torch.Tensor:
        pool, sequence = new_pool(model, 8), Sequence([1, 2, 3, 4])
        run(model, pool, [(sequence, prompt)])
        damage(pool, sequence)
        return run(model, pool, [(sequence, [5])])

    def swap_pages(pool: torch.Tensor, sequence: Sequence) -> None:
        sequence.pages[0], sequence.pages[1] = sequence.pages[1], sequence.pages[0]

    def damage_byte(pool: torch.Tensor, index: tuple[int, ...]) -> None:
        pool.view(torch.uint8)[index] ^= 1

    right = after(lambda pool, sequence: None)
    assert not torch.equal(right, after(swap_pages))
    last = 8 * pool_element_bytes(dtype) - 1
    for index in [(1, 0, 0, 0, 0, 0), (3, 1, 1, 1, 15, last), (2, 1, 0, 1, 7, 3)]:
        assert not torch.equal(right, after(lambda pool, sequence, i=index: damage_byte(pool, i)))


def pool_element_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def test_garbage_beyond_the_context_is_not_read(tmp_path: Path) -> None:
    model = load(tmp_path)
    batch = [(Sequence([1, 2]), list(range(20))), (Sequence([4]), list(range(5)))]
    clean = run(model, torch.zeros_like(new_pool(model, 6)), batch)
    again = [(Sequence([1, 2]), list(range(20))), (Sequence([4]), list(range(5)))]
    assert torch.equal(clean, run(model, new_pool(model, 6), again))


def test_eos_every_ends_at_multiples_of_the_context_length(tmp_path: Path) -> None:
    tokens = generate(load(tmp_path, eos_every=8), [1, 2, 3, 4, 5], 12)
    assert [i for i, token in enumerate(tokens) if token == EOS_TOKEN_ID] == [3, 11]


def test_an_end_token_outside_of_the_vocabulary_is_never_chosen(tmp_path: Path) -> None:
    assert len(generate(load(tmp_path, eos_token_id=1 << 20, eos_every=2), [1, 2, 3], 4)) == 4


def test_sleeps_for_steps_and_prefill_tokens(tmp_path: Path) -> None:
    model = load(tmp_path, step_s=0.02, token_s=0.002)
    pool, sequence = new_pool(model, 4), Sequence([1, 2])
    start = time.monotonic()
    run(model, pool, [(sequence, [1] * 20)])
    prefill_s = time.monotonic() - start
    run(model, pool, [(sequence, [1])])
    decode_s = time.monotonic() - start - prefill_s
    assert prefill_s >= 0.06
    assert 0.02 <= decode_s < 0.06


def test_tokenizer_round_trips_any_bytes(tmp_path: Path) -> None:
    write_mock_model(tmp_path, vocab_size=300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界 \n\t 🙂"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.ids == list(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("<|end|>").ids == [EOS_TOKEN_ID]
    assert tokenizer.get_vocab_size() == 300


def test_digests_follow_what_they_name(tmp_path: Path) -> None:
    def loaded(name: str, **overrides: Any) -> LoadedModel:
        return load_model(write_mock_model(tmp_path / name, **overrides))

    first, same, other = loaded("a"), loaded("b"), loaded("c", head_dim=16)
    assert first.content_digest == same.content_digest != other.content_digest
    assert first.serving_digest == same.serving_digest == other.serving_digest
    write_mock_model(tmp_path / "b", max_position_embeddings=64)
    assert load_model(tmp_path / "b").serving_digest != first.serving_digest


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    write_mock_model(tmp_path, head_dim=None)
    with pytest.raises(ConfigError, match="head_dim=None: is missing"):
        load_model(tmp_path)
