"""An engine in the own process answers lists of prompts as the servers would."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    Unavailable,
)
from paceline.core.finish import FinishReason
from paceline.engine.engine import Engine
from paceline.offline import LLM, Result
from tests.support.end_to_end import Alone
from tests.support.mock_model import write_mock_model

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, pool_mib=8, num_threads=1) as made:
        yield made


def tokens(results: list[Result]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in result.choices] for result in results]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "choices": {"temperature": 1.2, "seed": 7, "n": 3, "top_p": 0.9, "max_tokens": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_list_gets_the_tokens_of_one_request_after_the_other(
    llm: LLM, alone: Alone, name: str
) -> None:
    prompts = [[(7 * i + k) % 250 for k in range(length)] for i, length in enumerate((1, 16, 40))]
    expected = [alone.answer(prompt, **OPTIONS[name]) for prompt in prompts]
    assert tokens(llm.generate(prompts * 20, **OPTIONS[name])) == expected * 20


def test_texts_and_their_ids_get_the_same(llm: LLM) -> None:
    text, ids = llm.generate(["Hello", list(b"Hello")], temperature=0, max_tokens=6, logprobs=1)
    assert text.choices[0].token_ids == ids.choices[0].token_ids
    assert text.text == ids.text and text.num_prompt_tokens == 5
    assert len(text.choices[0].logprobs) == len(text.choices[0].token_ids)
    assert text.choices[0].finish in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_chat_is_its_rendered_text(llm: LLM) -> None:
    rendered = [258, *b"Hi", 256, 259]
    chat, text = (
        llm.chat([HI], temperature=0, max_tokens=8),
        llm.generate([rendered], temperature=0, max_tokens=8),
    )
    assert tokens(chat) == tokens(text)
    (long,) = llm.chat([HI], temperature=0, ignore_eos=True)
    assert long.num_prompt_tokens + len(long.choices[0].token_ids) == llm.context_length


def test_a_later_list_finds_the_prefixes_of_an_earlier_one(llm: LLM) -> None:
    prompt = [9] * 50
    (cold,), (warm,) = (llm.generate([prompt], temperature=0, max_tokens=4) for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert tokens([cold]) == tokens([warm])


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an empty prompt": ([[1], ""], {}, "prompt"),
    "no list": ("Hi", {}, "prompts"),
    "an option that is none": (["Hi"], {"max_token": 3}, "max_token"),
    "an option out of its bounds": (["Hi"], {"top_p": 2.0}, "top_p"),
    "an id that is none": ([[1], [900]], {}, "prompt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_and_ends_the_list(llm: LLM, name: str) -> None:
    prompts, options, field = WRONG[name]
    with pytest.raises(InvalidRequest) as raised:
        llm.generate(prompts, **options)
    assert raised.value.field == field
    assert llm.generate(["Hi"], max_tokens=1)[0].choices[0].token_ids


def test_prompts_beyond_the_context_and_broken_messages_are_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate([[1] * llm.context_length])
    with pytest.raises(ContextLengthExceeded):
        llm.chat([[{"role": "user", "content": "x" * llm.context_length}]])
    with pytest.raises(InvalidRequest, match=r"conversations\[1\]"):
        llm.chat([HI, [{"content": "Hi"}]])


def test_threads_may_share_one(llm: LLM) -> None:
    found: dict[int, list[Result]] = {}

    def ask(number: int) -> None:
        found[number] = llm.generate([[number] * 20] * 5, temperature=0, max_tokens=5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({str(t) for t in tokens(found[n])}) == 1 for n in range(4))


def test_the_example_runs(llm: LLM, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    program = page.split("## Without a server\n")[1].split("```")[1].removeprefix("python\n")
    exec(program.replace("MODEL_FOLDER", str(model)), {})
    prompts = ["The capital of France is", "Red and"]
    expected = llm.generate(prompts, temperature=0)
    assert capsys.readouterr().out == "".join(f"{result.text}\n" for result in expected)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_inputs_become_vectors(llm: LLM, alone: Alone, pooling: Any) -> None:
    inputs = [[(5 * i + k) % 250 for k in range(length)] for i, length in enumerate((1, 40, 256))]
    made = llm.embed(inputs, pooling=pooling, normalize=False)
    for vector, token_ids in zip(made.vectors, inputs, strict=True):
        np.testing.assert_allclose(vector, alone.embedding(token_ids, pooling), rtol=1e-5)
    assert made.num_prompt_tokens == 297
    unit = np.asarray(llm.embed(inputs, pooling=pooling, dimensions=2).vectors)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    assert unit.shape == (3, 2) and llm.embed([]).vectors == []
    with pytest.raises(ContextLengthExceeded):
        llm.embed([[1] * 257])
    with pytest.raises(InvalidRequest):
        llm.embed("text")


def test_an_empty_list_is_answered_by_one(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.chat([]) == []


def test_an_engine_that_fails_ends_what_waits_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(engine: Engine) -> None:
        raise RuntimeError("out of order")

    with LLM(model, pool_mib=8, num_threads=1) as broken:
        monkeypatch.setattr(Engine, "advance", fails)
        for _ in range(2):
            with pytest.raises(EngineFailure):
                broken.generate(["Hi"])
    broken.close()  # twice is once
    with pytest.raises(RuntimeError, match="closed"):
        broken.generate(["Hi"])


def test_one_that_is_closed_leaves_no_thread_no_descriptor_and_no_pool(model: Path) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        pools = Path("/proc/self/maps").read_text().count("memfd:")
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pools

    before = held()
    made = LLM(model, pool_mib=8, num_threads=1)
    made.generate(["Hi"] * 9, max_tokens=3)
    assert held() > before
    made.close()
    del made
    assert held() == before


def test_who_waits_while_it_is_closed_is_told(model: Path) -> None:
    llm = LLM(model, pool_mib=16, num_threads=1)
    ends: list[str] = []

    def ask_until_it_ends() -> None:
        while True:
            try:
                llm.generate([[1, 2, 3]] * 20, max_tokens=200, ignore_eos=True)
            except (Unavailable, RuntimeError) as error:
                ends.append(str(error))
                if "is closed" in ends[-1]:
                    return

    threads = [threading.Thread(target=ask_until_it_ends, daemon=True) for _ in range(3)]
    closers = [threading.Thread(target=llm.close, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    for thread in closers:
        thread.start()
    for thread in (*closers, *threads):
        thread.join(20)
    assert not any(thread.is_alive() for thread in (*closers, *threads))
    assert ends.count("this LLM is closed") == len(threads)


def test_a_model_or_setting_that_cannot_work_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        LLM(tmp_path / "none")
    with pytest.raises(ConfigError, match="max_running"):
        LLM(model, max_running=0)
