"""Penalties, biases, bad words, min_tokens and processors against plain loops over every token."""

import json
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import ConfigError, ErrorCode, InvalidRequest
from paceline.core.sampling import LogitsProcessorCall, SamplingParams
from paceline.engine import logit_edits
from paceline.engine.logit_edits import LogitEdits
from paceline.engine.logits_processors import ProcessorRow
from paceline.engine.messages import Reserve, Submit
from paceline.engine.sampler import collect, sample
from paceline.engine.sequence import Sequence
from tests.unit.engine.benches import EDITED, EOS, alone, bench, mock_model, prompt, request
from tests.unit.engine.sample_batches import batch, logits_of
from tests.unit.engine.sequences import VOCAB, sequence


def applied(drawing: Iterable[tuple[int, Sequence]], logits: torch.Tensor) -> torch.Tensor:
    """Edited logits, after checking that none of it stays."""
    before = logits.clone()
    with LogitEdits(drawing).applied(logits) as changed:
        edited = changed.clone()
    assert torch.equal(logits, before)
    return edited


def edited_by_definition(row: list[float], s: Sequence) -> list[float]:
    """Token by token, as vLLM's documentation has it."""
    sampling: SamplingParams = s.group.spec.sampling
    output: list[int] = s.output.tolist()
    seen, counts = {*s.prompt.tolist(), *output}, Counter(output)
    edited = []
    for token_id, logit in enumerate(row):
        logit += dict(sampling.logit_bias).get(token_id, 0.0)
        if token_id in seen:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * counts[token_id]
        logit -= sampling.presence_penalty * (counts[token_id] > 0)
        if is_bad(token_id, output, sampling.bad_words):
            logit = -np.inf
        if token_id in s.group.stop_ids and len(output) < sampling.min_tokens:
            logit = -np.inf
        edited.append(logit)
    return edited


def is_bad(token_id: int, output: list[int], words: Many[Many[int]]) -> bool:
    text = [*output, token_id]
    return any(text[-len(word) :] == list(word) for word in words)


OUTPUT = [5, 20, 21, 5, 5, 9]
CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.3},
    {"frequency_penalty": -0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"logit_bias": ((0, 100.0), (5, -100.0), (96, 0.5))},
    {"logit_bias": ((5, 4.0), (20, -3.0)), "repetition_penalty": 2.0},
    {"bad_words": ((3,), (9, 4), (5, 9, 8), (5, 5, 9, 7), (21, 9, 6), (5, 20, 21, 5, 5, 9, 2))},
    {"bad_words": tuple((i % 97, i * 7 % 97) for i in range(200))},
    {"min_tokens": 6, "stop_token_ids": (30, 31)},
    {"min_tokens": 7, "stop_token_ids": (30, 31)},
    {"min_tokens": 7, "stop_token_ids": (30, 31), "ignore_eos": True},
    {k: v for k, v in EDITED.items() if k != "logits_processors"} | {"min_tokens": 9},
]


@pytest.mark.parametrize("at_once", [7, 1 << 14])
@pytest.mark.parametrize("output", [[], OUTPUT[:1], OUTPUT, OUTPUT * 9])
def test_equal_their_definition(
    monkeypatch: pytest.MonkeyPatch, output: list[int], at_once: int
) -> None:
    """All cases as rows of one batch, then each alone."""
    monkeypatch.setattr(logit_edits, "_SERIAL", at_once)
    sequences = [sequence([5, 6, 7, 6, 40], output, **case) for case in CASES]
    logits = logits_of(len(CASES), vocab=VOCAB)
    rows = [edited_by_definition(*pair) for pair in zip(logits.tolist(), sequences, strict=True)]
    expected = torch.tensor(rows)
    edited = applied(enumerate(sequences), logits)
    torch.testing.assert_close(edited, expected, rtol=1e-6, atol=1e-6)
    for i, one in enumerate(sequences):
        alone_edited = applied([(0, one)], logits[i : i + 1])
        assert torch.equal(alone_edited[0], edited[i])


def test_counts_follow_the_output() -> None:
    grown = sequence([5, 6], [], repetition_penalty=1.3, frequency_penalty=0.5)
    logits = logits_of(1, vocab=VOCAB)
    for token_id in [*range(8, 90), 9, 9, 6, 5, 30]:
        expected = torch.tensor([edited_by_definition(logits[0].tolist(), grown)])
        torch.testing.assert_close(applied([(0, grown)], logits), expected)
        grown.append(token_id)


def test_draws_from_edited_logits_follow_their_softmax() -> None:
    """Chi-square at p = 0.001 over 8 tokens, one of them masked: 6 degrees of freedom."""
    s = sequence(
        [0, 1],
        [2, 2, 3],
        repetition_penalty=1.4,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((4, 1.5), (5, -0.5)),
        bad_words=((6,),),
    )
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, 3.0, -2.0])
    num = 20_000
    samples = batch(num, rows=np.zeros(num, np.int64), edits=LogitEdits((i, s) for i in range(num)))
    counts = np.bincount(collect(sample(row[None], samples), samples).token_ids, minlength=8)
    expected = torch.softmax(torch.tensor(edited_by_definition(row.tolist(), s)), 0).numpy() * num
    assert counts[6] == expected[6] == 0
    kept = expected > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 22.46


def test_logprobs_are_of_the_logits_before_any_edit() -> None:
    logits = logits_of(2, vocab=VOCAB)
    best = int(logits[0].argmax())
    s = sequence([1], [], bad_words=((best,),))
    samples = batch(2, temperature=0.0, num_logprobs=2, edits=LogitEdits([(0, s)]))
    result = collect(sample(logits, samples), samples)
    expected = torch.log_softmax(logits[0].double(), 0)
    first = result.logprobs[0]
    assert result.token_ids[0] != best and first is not None
    assert first.top[0][0] == best
    assert first.logprob == pytest.approx(expected[result.token_ids[0]].item(), abs=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"n": 3}])
def test_an_answer_without_repetition(sampling: dict[str, Any]) -> None:
    """The strongest penalties and a bias: every token of the answer is another one."""
    spec = request(
        prompt(20),
        max_tokens=40,
        temperature=0.5,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=50.0,
        **sampling,
    )
    for tokens in alone(spec).values():
        assert len(tokens) == 40 and len(set(tokens)) == 40
        assert not set(tokens) & set(spec.token_ids)


def test_bad_words_and_biases_shape_an_answer() -> None:
    spec = request(prompt(20), max_tokens=12, logit_bias=((11, 60.0), (12, 40.0)))
    assert alone(spec)[0] == [11] * 12
    words = ((11, 11), (11, 12, 11))
    spec = request(prompt(20), max_tokens=12, logit_bias=((11, 60.0), (12, 40.0)), bad_words=words)
    tokens = alone(spec)[0]
    assert tokens[:3] == [11, 12, 12]
    text = ",".join(map(str, tokens))
    assert "11,11" not in text and "11,12,11" not in text


def test_only_allowed_token_ids_come() -> None:
    call = LogitsProcessorCall("allowed_token_ids", '{"token_ids": [3, 17, 60]}')
    spec = request(prompt(20), max_tokens=30, temperature=3.0, logits_processors=(call,))
    assert set(alone(spec)[0]) == {3, 17, 60}


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("os.system", "{}", "is not registered; there are allowed_token_ids"),
        ("allowed_token_ids", "{}", "takes"),
        ("allowed_token_ids", '{"token_ids": []}', "takes"),
        ("allowed_token_ids", '{"token_ids": [97]}', "between 0 and 96"),
        ("allowed_token_ids", '{"token_ids": [true]}', "between 0 and 96"),
    ],
)
def test_wrong_processors_are_refused(name: str, arguments: str, reason: str) -> None:
    call = LogitsProcessorCall(name, arguments)
    b = bench().handle(Submit(1, request(prompt(20), logits_processors=(call,)))).run()
    assert b.failure(1).code is ErrorCode.INVALID_REQUEST
    assert b.failure(1).field == "logits_processors"
    assert reason in b.failure(1).message
    b.assert_idle()


class Shift:
    """+ amount for the token after the last one; knows its rows' tokens. Of a negative amount -p
    it breaks at position p - 1 of the output."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self, arguments: dict[str, Any]) -> float:
        return float(arguments["amount"])

    def apply(self, logits: torch.Tensor, rows: Many[ProcessorRow]) -> None:
        for logits_row, row in zip(logits, rows, strict=True):
            logits_row += 1000.0  # must not stay when a row behind it throws
            if row.prepared < 0 and len(row.output) == -1 - row.prepared:
                raise RuntimeError("broken")
            logits_row -= 1000.0
            last = [*row.prompt.tolist(), *row.output.tolist()][-1]
            logits_row[(last + 1) % self.vocab_size] += row.prepared


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, point: str) -> None:
    """What pip leaves of a package that offers a processor."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[paceline.logits_processors]\n{point}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "some-package", f"shift = {__name__}:Shift")


def shifted(amount: float, **sampling: Any) -> Any:
    call = LogitsProcessorCall("shift", json.dumps({"amount": amount}))
    return request(prompt(20), max_tokens=5, logits_processors=(call,), **sampling)


@pytest.mark.usefixtures("shift")
def test_the_processor_of_an_installed_package_sees_prompt_and_output() -> None:
    last = prompt(20)[-1]
    expected = [(last + 1 + i) % VOCAB for i in range(5)]
    assert alone(shifted(500.0, ignore_eos=True))[0] == expected
    masked = shifted(500.0, bad_words=((expected[0],),))
    assert alone(masked)[0][0] != expected[0], "what is masked stays masked"


def test_a_processor_that_is_named_twice_is_applied_twice() -> None:
    for calls in ((allowed(3, 17), allowed(17, 60)), (allowed(17, 60), allowed(3, 17))):
        spec = request(prompt(20), max_tokens=9, temperature=3.0, logits_processors=calls)
        assert set(alone(spec)[0]) == {17}


@pytest.mark.usefixtures("shift")
def test_processors_are_applied_in_the_order_of_each_request() -> None:
    """In one batch, in which each has another order."""
    lift, only = LogitsProcessorCall("shift", '{"amount": 5}'), allowed(6, 9)
    lists = [(lift, only), (only, lift), (only, lift, lift), (lift,), (lift, lift, only)]
    logits = torch.zeros(len(lists), VOCAB)
    sequences = [sequence([5], [], logits_processors=calls) for calls in lists]
    edited = applied(enumerate(sequences), logits)
    assert edited[:, 6].tolist() == [5, 5, 10, 5, 10]
    assert edited.isfinite().sum(dim=1).tolist() == [2, 2, 2, VOCAB, 2]
    for i, one in enumerate(sequences):
        assert torch.equal(applied([(0, one)], logits[i : i + 1])[0], edited[i])


@pytest.mark.usefixtures("shift")
@pytest.mark.parametrize("position", [0, 2])
def test_a_processor_that_fails_ends_the_guilty_request_only(position: int) -> None:
    """The others are in the same calls of it, and have edits that may be made but once."""
    good, bias = request(prompt(20), max_tokens=5), ((30, 1.0), (31, 2.0))
    others = [shifted(2.0, logit_bias=bias, n=2), shifted(3.0, repetition_penalty=1.5)]
    b = bench().handle(Submit(1, others[0]), Submit(2, shifted(-1.0 - position, n=2)))
    b.handle(Submit(3, good), Submit(4, others[1]), Submit(5, shifted(-1.0 - position))).run()
    for slot in (2, 5):
        assert b.failure(slot).code is ErrorCode.INVALID_REQUEST  # no other worker is asked
        reason = f"logits_processors='shift': failed at position {position} of the output"
        assert b.failure(slot).message == reason
        assert len(b.tokens(slot)) == position
    for slot, spec in ((1, others[0]), (3, good), (4, others[1])):
        assert {c: b.tokens(slot, c) for c in spec.choices} == alone(spec)
    b.assert_idle()


@pytest.mark.usefixtures("shift")
def test_what_has_failed_is_not_shown_to_the_processors_behind() -> None:
    broken, lift = (LogitsProcessorCall("shift", f'{{"amount": {a}}}') for a in (-1, 5))
    lists = [(lift, broken, lift), (lift, lift, lift), (broken, broken), (lift,)]
    edits = LogitEdits(
        enumerate(sequence([5], [], logits_processors=calls) for calls in lists)  # next: 6
    )
    with edits.applied(torch.zeros(len(lists), VOCAB)) as edited:
        assert edited[[1, 3], 6].tolist() == [15, 5]
    assert edits.failed == {0: "shift", 2: "shift"}


@pytest.mark.usefixtures("shift")
@pytest.mark.parametrize(("arguments", "said"), [("{}", "KeyError"), ('{"amount": "x"}', "Value")])
def test_a_processor_that_fails_to_prepare_refuses_its_request_only(
    arguments: str, said: str
) -> None:
    good = request(prompt(20), max_tokens=5)
    call = LogitsProcessorCall("shift", arguments)
    bad = request(prompt(20, salt=1), logits_processors=(call,))
    b = bench().handle(Submit(1, bad), Reserve(2, bad), Submit(3, good)).run()
    for slot in (1, 2):
        assert b.failure(slot).code is ErrorCode.INVALID_REQUEST
        assert b.failure(slot).field == "logits_processors"
        message = f"logits_processors='shift': does not take these arguments: {said}"
        assert b.failure(slot).message.startswith(message)
    assert b.tokens(3) == alone(good)[0]
    b.assert_idle()


def test_a_processor_cannot_write_tokens() -> None:
    edits = LogitEdits([(0, sequence([5, 6], [7], logits_processors=(allowed(9),)))])
    ((row,),) = (rows.rows for rows in edits._processors.values())
    assert not row.prompt.flags.writeable and not row.output.flags.writeable


def test_a_processor_that_cannot_be_loaded_stops_the_engine_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "some-package", "gone = no_such_module:Thing")
    with pytest.raises(ConfigError, match="logits_processors='gone': cannot be loaded"):
        bench()


@pytest.mark.usefixtures("shift")
@pytest.mark.parametrize("name", ["allowed_token_ids", "shift"])
def test_a_name_that_is_given_twice_stops_the_engine_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A built-in one's, and one of two packages."""
    install(tmp_path, monkeypatch, "other-package", f"{name} = {__name__}:Other")
    with pytest.raises(ConfigError, match=f"logits_processors='{name}': stands for .*Other"):
        bench()


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": ((97, 1.0),)}, {"bad_words": ((3, 97),)}], ids=str
)
def test_ids_outside_of_the_vocabulary_are_refused(sampling: dict[str, Any]) -> None:
    b = bench().handle(Submit(1, request(prompt(20), **sampling))).run()
    assert b.failure(1).code is ErrorCode.INVALID_REQUEST
    assert "between 0 and 96" in b.failure(1).message


def allowed(*token_ids: int) -> LogitsProcessorCall:
    return LogitsProcessorCall("allowed_token_ids", json.dumps({"token_ids": token_ids}))


DEAD_ENDS: list[tuple[dict[str, Any], int, str]] = [
    ({"bad_words": tuple((i,) for i in range(VOCAB))}, 0, "bad_words='97 sequences'"),
    ({"logits_processors": (allowed(9),), "bad_words": ((9,),)}, 0, "beside bad_words"),
    ({"logits_processors": (allowed(9),), "bad_words": ((9, 9, 9),), "n": 3}, 2, "bad_words"),
    ({"logits_processors": (allowed(EOS),), "min_tokens": 2}, 0, "beside min_tokens"),
    (
        {"logits_processors": (allowed(9),), "min_tokens": 2, "stop_token_ids": (9,)},
        0,
        "logits_processors=['allowed_token_ids']",
    ),
    ({"logits_processors": (allowed(9), allowed(8))}, 0, "logits_processors"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("sampling", "position", "said"), DEAD_ENDS)
def test_a_request_that_forbids_every_token_is_at_fault_itself(
    sampling: dict[str, Any], position: int, said: str, temperature: float
) -> None:
    """Another worker would find no token either; those beside it do not notice."""
    good = request(prompt(20), max_tokens=9)
    bad = request(prompt(20, salt=1), temperature=temperature, **sampling)
    b = bench().handle(Submit(1, bad), Submit(2, good)).run()
    assert b.failure(1).code is ErrorCode.INVALID_REQUEST
    assert said in b.failure(1).message
    assert b.failure(1).message.startswith(f"{b.failure(1).field}=")
    assert f"leaves no token to draw at position {position} of the output" in b.failure(1).message
    assert len(b.tokens(1)) == position
    assert b.tokens(2) == alone(good)[0]
    b.assert_idle()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_not_the_callers_fault(value: float) -> None:
    model = mock_model()
    forward = model.forward

    def broken(*arguments: Any) -> torch.Tensor:
        return forward(*arguments).fill_(value)

    model.forward = broken  # type: ignore[method-assign]
    spec = request(prompt(20), bad_words=((9,),))
    b = bench(model).handle(Submit(1, spec)).run()
    assert b.failure(1).code is ErrorCode.INTERNAL
    assert b.failure(1).message == "no token can be drawn: logits are not finite"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("typical_p", 0.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((i, 1.0) for i in range(1025))),
        ("bad_words", ((),)),
        ("bad_words", ((1,) * 65,)),
        ("bad_words", ((1,),) * 513),
        ("num_prompt_logprobs", 21),
        ("num_prompt_logprobs", -2),
        ("logits_processors", (LogitsProcessorCall("x"),) * 9),
    ],
)
def test_bounds(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field.removeprefix("num_")


@pytest.mark.parametrize("arguments", ["[]", "3", "{", "[" * 5000, '{"a": "' + "x" * 9000 + '"}'])
def test_arguments_are_a_bounded_json_object(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="logits_processors"):
        LogitsProcessorCall("x", arguments)


def test_eos_is_not_masked_once_it_may_come() -> None:
    model = mock_model(eos_every=24)
    spec = request(prompt(20), max_tokens=30, min_tokens=4, frequency_penalty=0.1)
    b = bench(model).handle(Submit(1, spec)).run()
    assert b.tokens(1)[-1] == EOS and len(b.tokens(1)) == 5
