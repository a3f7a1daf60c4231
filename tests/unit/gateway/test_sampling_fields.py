"""Fields of sampling on their way from HTTP and gRPC to a router, and a prompt's logprobs back."""

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from paceline.gateway.bad_words import bad_word_ids
from paceline.gateway.config import GatewayConfig
from paceline.gateway.tokenizer import TextModel
from paceline.rpc.channel import connect
from paceline.rpc.convert import sampling_from_proto
from paceline.v1.common_pb2 import (
    LogitsProcessor,
    PositionLogprobs,
    PromptLogprobs,
    TokenIds,
    TokenLogprob,
)
from paceline.v1.generate_pb2 import GenerateRequest, GenerateResponse
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_deployment import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARED: dict[str, Any] = {
    "min_p": 0.25,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -2,
    "frequency_penalty": 2,
}


def part(first_position: int, *token_ids: int, num_top: int = 2) -> PromptLogprobs:
    """The best token of a position is the one after that in the prompt."""
    positions = []
    for token_id in token_ids:
        best = [TokenLogprob(token_id=token_id + 1 + i, logprob=-0.5 - i) for i in range(num_top)]
        chosen = TokenLogprob(token_id=token_id, logprob=-2.5)
        positions.append(PositionLogprobs(chosen=chosen, top=best, rank=7))
    return PromptLogprobs(first_position=first_position, positions=positions)


async def generate(deployment: Deployment, **fields: Any) -> list[GenerateResponse]:
    async with connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel:
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        request = GenerateRequest(**{"text": "Hi", **fields})
        return [response async for response in stub.Generate(request, timeout=5)]


async def test_all_fields_reach_the_router_the_same_way(deployment: Deployment) -> None:
    bias = {"5": 100, "259": -0.5}
    calls = ["plain", {"name": "other", "arguments": {"a": [1, "ü"]}}]
    body = SHARED | {"logit_bias": bias, "bad_words": ["ab", " ab", "c"]}
    await deployment.chat(prompt_logprobs=3, logits_processors=calls, **body)
    await deployment.complete(prompt_logprobs=3, logits_processors=calls, **body)
    await generate(
        deployment,
        num_prompt_logprobs=3,
        logit_bias={5: 100, 259: -0.5},
        bad_words=["ab"],
        bad_token_ids=[TokenIds(ids=[99])],
        logits_processors=[
            LogitsProcessor(name="plain"),
            LogitsProcessor(name="other", arguments='{"a":[1,"ü"]}'),
        ],
        **SHARED,
    )
    for submission in deployment.router.submissions:
        sampling = submission.request.sampling
        assert {name: getattr(sampling, name) for name in SHARED} == SHARED
        assert dict(sampling.logit_bias) == {5: 100, 259: -0.5}
        assert [list(word.ids) for word in sampling.bad_words] == [[97, 98], [99]]
        assert sampling.num_prompt_logprobs == 3
        plain, other = sampling.logits_processors
        assert (plain.name, plain.arguments) == ("plain", "{}")
        assert other.name == "other" and other.arguments.replace(" ", "") == '{"a":[1,"ü"]}'


async def test_hoped_for_times_reach_the_router_less_what_was_spent(deployment: Deployment) -> None:
    wanted = {"ttft_ms": 5000, "itl_ms": 12.5}
    for ask in (deployment.chat, deployment.complete, functools.partial(generate, deployment)):
        await ask(**wanted)
        await ask()
        hopes, silent = (made.request for made in deployment.router.submissions[-2:])
        assert 3000 < hopes.ttft_ms < 5000 and hopes.itl_ms == 12.5
        assert (silent.ttft_ms, silent.itl_ms, silent.tenant_weight) == (0, 0, 1)
        await ask(ttft_ms=0.001)
        late = deployment.router.submissions[-1].request
        assert late.ttft_ms == 1, "as soon as can be; 0 would say nothing"


@pytest.mark.parametrize("name", ["ttft_ms", "itl_ms"])
@pytest.mark.parametrize("value", [0, -1, 3_600_000.5])
async def test_times_that_nobody_can_hope_for_are_refused(
    deployment: Deployment, name: str, value: float
) -> None:
    fields = {name: value}
    error = (await deployment.complete(**fields)).json()["error"]
    assert error["param"] == name and "3600000" in error["message"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(deployment, **fields)
    assert caught.value.details() == error["message"]
    assert not deployment.router.submissions


SMALLEST = {"repetition_penalty": 1e-6, "top_p": 1e-46, "typical_p": 5e-324, "temperature": 1e-50}
BEYOND = {
    "repetition_penalty": 1e6 * (1 + 1e-15),
    "top_p": 1 + 1e-15,
    "typical_p": -1e-50,
    "temperature": 100.00000000001,
    "min_p": -1e-50,
    "presence_penalty": 2.0000000000001,
    "frequency_penalty": -2.0000000000001,
}


async def test_numbers_are_compared_as_they_are_sent(deployment: Deployment) -> None:
    """Not as float32, whose 1e-6 lies below the bound."""
    response = await deployment.complete(**SMALLEST)
    assert response.status_code == 200, response.text
    await generate(deployment, **SMALLEST)
    assert len(deployment.router.submissions) == 2
    for submission in deployment.router.submissions:
        sampling = sampling_from_proto(submission.request.sampling)
        assert {name: getattr(sampling, name) for name in SMALLEST} == SMALLEST


@pytest.mark.parametrize("name", BEYOND)
async def test_a_refusal_names_the_number_that_was_sent(deployment: Deployment, name: str) -> None:
    fields = {name: BEYOND[name]}
    error = (await deployment.complete(**fields)).json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name}={BEYOND[name]!r}: must")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(deployment, **fields)
    assert caught.value.details() == error["message"]


async def test_what_is_not_given_is_off(deployment: Deployment) -> None:
    await deployment.complete()
    await generate(deployment)
    for submission in deployment.router.submissions:
        sampling = submission.request.sampling
        assert sampling.min_p == sampling.presence_penalty == sampling.frequency_penalty == 0
        assert sampling.typical_p == sampling.repetition_penalty == 1
        assert not (sampling.logit_bias or sampling.bad_words or sampling.logits_processors)
        assert not sampling.HasField("num_prompt_logprobs")


class Words:
    """A vocabulary in which "cat" and " cat" are one token each, and " xy" is three."""

    IDS = {"cat": [3], " cat": [4], "xy": [5, 6], " xy": [1, 5, 6], "up": [7], " up": [7]}

    def encode_words(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.IDS.get(text, []) for text in texts]


async def test_a_bad_word_counts_behind_a_space_too() -> None:
    ids = bad_word_ids(Words(), ["cat", " xy", "up", "cat"])  # type: ignore[arg-type]
    assert ids == ((3,), (4,), (5, 6), (7,))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those in which words were tokenised: word 12 has the tokens 1, 12, behind a space 2, 12."""
    threads: list[str] = []

    def encode_words(self: TextModel, texts: Sequence[str]) -> list[list[int]]:
        threads.append(threading.current_thread().name.split("_")[0])
        return [[1 + text.startswith(" "), int(text)] for text in texts]

    monkeypatch.setattr(TextModel, "encode_words", encode_words)
    return threads


async def test_all_bad_words_that_are_promised_may_have_two_forms(
    deployment: Deployment, threads: list[str]
) -> None:
    words = [str(i) for i in range(256)]
    assert (await deployment.chat(bad_words=words)).status_code == 200
    assert (await deployment.complete(["a", "b"], bad_words=words)).status_code == 200
    await generate(deployment, bad_words=words)
    assert len(deployment.router.submissions) == 4
    expected = tuple((first, i) for i in range(256) for first in (1, 2))
    for submission in deployment.router.submissions:
        assert sampling_from_proto(submission.request.sampling).bad_words == expected
    assert threads == ["short-texts"] * 3
    long = ["0" * 250 + word.zfill(3) for word in words]
    assert (await deployment.complete(bad_words=long)).status_code == 200
    assert threads[3:] == ["long-texts"]


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"stop": ""}, {"priority": 2**31}, {"max_tokens": 1000}, {"n": 129}]
    + [{"bad_words": ["1"] * 257}, {"bad_words": ["1", ""]}, {"prompt_logprobs": 21}],
    ids=str,
)
async def test_bad_words_of_a_request_that_is_wrong_are_not_tokenised(
    deployment: Deployment, threads: list[str], fields: dict[str, Any]
) -> None:
    fields = {"bad_words": ["1"], **fields}
    for ask in (deployment.chat, deployment.complete):
        assert (await ask(**fields)).status_code == 400
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        stop = {"stop": [fields["stop"]]} if "stop" in fields else {}
        priority = {"priority": 0, "n": 129} if "priority" in fields else {}  # 32 bits there
        scores = {"num_prompt_logprobs": 21} if fields.pop("prompt_logprobs", None) else {}
        await generate(deployment, **(fields | stop | priority | scores))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert threads == []


async def test_prompt_logprobs_of_completions_stand_in_each_choice(deployment: Deployment) -> None:
    def reply(request: Any) -> Any:
        first, second, *_ = request.token_ids
        return bytes_reply(b"x", prompt_parts=[part(1, second), part(2, first + 1)])

    deployment.router.reply = reply
    answer = (
        await deployment.complete([[65, 66, 67], [70, 71, 72]], n=2, prompt_logprobs=2)
    ).json()
    texts = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert texts[2] == [
        None,
        {
            "71": {"logprob": -2.5, "rank": 7, "decoded_token": "G"},
            "72": {"logprob": -0.5, "rank": 1, "decoded_token": "H"},
            "73": {"logprob": -1.5, "rank": 2, "decoded_token": "I"},
        },
        {
            "71": {"logprob": -2.5, "rank": 7, "decoded_token": "G"},
            "72": {"logprob": -0.5, "rank": 1, "decoded_token": "H"},
            "73": {"logprob": -1.5, "rank": 2, "decoded_token": "I"},
        },
    ]
    assert "prompt_logprobs" not in (await deployment.complete()).json()["choices"][0]


async def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(deployment: Deployment) -> None:
    impossible = part(1, 65, num_top=0)
    impossible.positions[0].chosen.logprob = -math.inf
    deployment.router.reply = lambda request: bytes_reply(b"x", prompt_parts=[impossible])
    answer = (await deployment.chat(prompt_logprobs=0)).json()
    entry = {"logprob": -9999.0, "rank": 7, "decoded_token": "A"}
    assert answer["prompt_logprobs"] == [None, {"65": entry}]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_parts_that_an_attempt_repeats_count_once(deployment: Deployment) -> None:
    parts = [part(1, 65, 66), part(1, 65, 66), part(2, 66, 67), part(4, 68)]
    deployment.router.reply = lambda request: bytes_reply(b"x", prompt_parts=parts)
    answer = (await deployment.complete(prompt_logprobs=0)).json()
    found = answer["choices"][0]["prompt_logprobs"]
    chosen = [next(i for i, token in entry.items() if token["rank"] == 7) for entry in found[1:]]
    assert chosen == ["65", "66", "67", "68"]
    responses = await generate(deployment, num_prompt_logprobs=0)
    streamed = [r.prompt_logprobs for r in responses if r.HasField("prompt_logprobs")]
    assert [(p.first_position, len(p.positions)) for p in streamed] == [(1, 2), (3, 1), (4, 1)]
    assert [bytes(r.token_ids) for r in responses if r.token_ids] == [b"x"]


def limited_to(config: GatewayConfig, **limits: int) -> GatewayConfig:
    return dataclasses.replace(config, limits=dataclasses.replace(config.limits, **limits))


async def test_prompt_logprobs_of_an_answer_are_bounded(deployment: Deployment) -> None:
    """Ids of 4 bytes would come back as 1.4 KB each, in every choice of a completion."""
    limited = limited_to(deployment.gateway.serving.config, max_prompt_logprobs=240)
    deployment.gateway.serving.config, config = limited, deployment.gateway.serving.config
    try:
        refused = [
            await deployment.complete([[1] * 20, [2] * 20, [3]], prompt_logprobs=5),
            await deployment.complete([1] * 41, prompt_logprobs=1, n=3),
            await deployment.chat("x" * 81, prompt_logprobs=2),
        ]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(deployment, tokens=TokenIds(ids=[1] * 41), num_prompt_logprobs=5)
        assert str(caught.value.details()).startswith("num_prompt_logprobs=5: with 41 prompt")
        assert not deployment.router.submissions
        assert (await deployment.complete([[1] * 20] * 2, prompt_logprobs=5)).status_code == 200
        assert (await deployment.complete([1] * 40, prompt_logprobs=1, n=3)).status_code == 200
        assert (await deployment.complete([[1] * 200] * 9)).status_code == 200
        assert await generate(deployment, tokens=TokenIds(ids=[1] * 40), num_prompt_logprobs=5)
    finally:
        deployment.gateway.serving.config = config
    messages = [response.json()["error"]["message"] for response in refused]
    assert messages[0].startswith("prompt_logprobs=5: with 41 prompt tokens that is 246 values")
    assert "with 41 prompt tokens and 3 choices that is 246 values" in messages[1]
    assert [response.status_code for response in refused] == [400] * 3


async def test_logprobs_of_an_answer_in_one_piece_are_bounded(deployment: Deployment) -> None:
    """128 choices of 8192 tokens with 20 others each would be gigabytes, encoded at once."""
    limited = limited_to(deployment.gateway.serving.config, max_answer_logprobs=240)
    deployment.gateway.serving.config, config = limited, deployment.gateway.serving.config
    few = {"logprobs": True, "top_logprobs": 2}
    try:
        refused = [
            await deployment.chat(**few, max_tokens=41, n=2),
            await deployment.chat(logprobs=True),  # max_tokens: what the context has left
            await deployment.complete(["Hi", "Ho"], logprobs=3, max_tokens=31),
        ]
        assert not deployment.router.submissions
        assert (await deployment.chat(**few, max_tokens=40, n=2)).status_code == 200
        assert (await deployment.chat(**few, max_tokens=41, n=2, stream=True)).status_code == 200
        assert (await deployment.chat(n=2)).status_code == 200
        answer = await deployment.complete(["Hi", "Ho"], logprobs=3, max_tokens=30)
        assert answer.status_code == 200
        assert await generate(deployment, num_logprobs=5, max_tokens=100)
    finally:
        deployment.gateway.serving.config = config
    assert [response.status_code for response in refused] == [400] * 3
    errors = [response.json()["error"] for response in refused]
    assert [e["param"] for e in errors] == ["top_logprobs", "top_logprobs", "logprobs"]
    assert errors[0]["message"].startswith("top_logprobs=2: with 82 tokens in all choices")
    assert "that is 246 values in an answer; at most 240 without stream" in errors[0]["message"]


async def test_logprobs_of_many_steps_make_one_list(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"Hello")
    chat = (await deployment.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
    entries = chat["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries[:5]) == "Hello"
    lists = (await deployment.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert lists["tokens"][:5] == list("Hello") and lists["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert {len(lists[name]) for name in lists} == {len(entries)}


async def test_a_missing_part_fails_the_request(deployment: Deployment) -> None:
    deployment.router.reply = lambda request: bytes_reply(b"x", prompt_parts=[part(2, 65)])
    assert (await deployment.complete(prompt_logprobs=0)).status_code == 500
