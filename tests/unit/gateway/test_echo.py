"""Completions that show their prompt, the best of several choices, and what ends a text."""

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.gateway import completions
from paceline.v1.common_pb2 import PositionLogprobs, PromptLogprobs, TokenLogprob, TokenRequest
from tests.support.fake_router_service import STOP, Reply, bytes_reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


def scored(token_ids: Sequence[int]) -> PromptLogprobs:
    """Each token but the first: -2.5, and the one after it in the vocabulary -0.5."""
    positions = [
        PositionLogprobs(
            chosen=TokenLogprob(token_id=token_id, logprob=-2.5),
            top=[TokenLogprob(token_id=(token_id + 1) % 256, logprob=-0.5)],
            rank=2,
        )
        for token_id in token_ids
    ]
    return PromptLogprobs(first_position=1, positions=positions[1:])


def scoring_reply(request: TokenRequest) -> Reply:
    return bytes_reply(b"yz", prompt_parts=[scored(request.token_ids)])


@pytest.mark.parametrize("prompt", ["é<|end|>a", [0xC3, 0xA9, 97]])
async def test_an_echo_is_the_prompt_and_then_the_output(
    deployment: Deployment, prompt: str | list[int]
) -> None:
    shown = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    found = (await deployment.complete(prompt, echo=True, n=2)).json()
    assert [choice["text"] for choice in found["choices"]] == [shown + "Hello"] * 2
    assert found["usage"]["completion_tokens"] == 10
    response = await deployment.complete(prompt, echo=True, stream=True)
    events = [event["choices"][0] for event in sse_events(response.text)[:-1]]
    assert events[0]["text"] == shown and "".join(e["text"] for e in events) == shown + "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_logprobs_has_one_entry_a_token(
    deployment: Deployment, stream: bool
) -> None:
    deployment.router.reply = scoring_reply
    response = await deployment.complete(["aé", "b"], echo=True, logprobs=1, stream=stream)
    if stream:
        events = [event["choices"][0] for event in sse_events(response.text)[:-1]]
        own = [e["logprobs"] for e in events if e["index"] == 0 and e["logprobs"]]
        found = {name: sum((e[name] for e in own), []) for name in own[0]}
    else:
        first, second = response.json()["choices"]
        found = first["logprobs"]
        assert "prompt_logprobs" not in first
        assert second["logprobs"]["tokens"] == ["b", "y", "z"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "y", "z"]
    assert found["token_logprobs"] == [None, -2.5, -2.5, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 1, 2, 3]
    assert found["top_logprobs"][:2] == [None, {"bytes:\\xc4": -0.5}]
    assert found["top_logprobs"][3] == {"y": -0.5}
    assert [s.request.sampling.num_prompt_logprobs for s in deployment.router.submissions] == [1, 1]


async def test_an_echo_is_bounded_with_all_its_choices(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_ECHO_CHARS", 100)
    assert (await deployment.complete(["x" * 20, "y" * 30], echo=True, n=2)).status_code == 200
    for fields in ({"n": 3}, {"best_of": 3}):
        refused = await deployment.complete(["x" * 20, "y" * 30], echo=True, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"
        assert "150 characters" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_prompt_with_max_tokens_0(deployment: Deployment, stream: bool) -> None:
    deployment.router.reply = scoring_reply
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    response = await deployment.complete(
        "ab", echo=True, logprobs=0, max_tokens=0, stream=stream, **fields
    )
    if stream:
        echo, end, last, _ = sse_events(response.text)
        usage, choice = last["usage"], echo["choices"][0]
        assert end["choices"][0]["text"] == "" and end["choices"][0]["finish_reason"] == "length"
    else:
        found = response.json()
        usage, choice = found["usage"], found["choices"][0]
        assert choice["finish_reason"] == "length"
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.5]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == 2
    assert deployment.router.submissions[0].request.sampling.max_tokens == 1


async def test_an_echo_beside_prompt_logprobs_of_its_own(deployment: Deployment) -> None:
    deployment.router.reply = scoring_reply
    answer = await deployment.complete("ab", echo=True, logprobs=0, prompt_logprobs=1)
    choice = answer.json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["prompt_logprobs"][1]["99"]["logprob"] == -0.5


async def test_best_of_shows_the_choices_with_the_highest_log_probability_a_token(
    deployment: Deployment,
) -> None:
    scores = {0: -3.0, 1: -1.0, 2: -2.0, 3: -4.0}

    def reply(request: TokenRequest) -> Reply:
        return Reply([[97], [98]], logprob_of=scores.__getitem__, names_choice=True)

    deployment.router.reply = reply
    found = (await deployment.complete(["p", "q"], best_of=4, n=2)).json()
    assert [choice["text"] for choice in found["choices"]] == ["1b", "2b"] * 2
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in found["choices"])
    assert found["usage"]["completion_tokens"] == 16
    sampling = deployment.router.submissions[0].request.sampling
    assert sampling.n == 4 and sampling.num_logprobs == 0


async def test_best_of_that_equals_n_is_none(deployment: Deployment) -> None:
    answer = await deployment.complete(best_of=2, n=2)
    assert len(answer.json()["choices"]) == 2
    assert not deployment.router.submissions[0].request.sampling.HasField("num_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ends_a_text_is_shown_when_asked_for(
    deployment: Deployment, stream: bool
) -> None:
    async def text(**fields: Any) -> str:
        response = await deployment.complete(stream=stream, **fields)
        if not stream:
            return str(response.json()["choices"][0]["text"])
        return "".join(e["choices"][0]["text"] for e in sse_events(response.text)[:-1])

    shows = {"include_stop_str_in_output": True}
    deployment.router.reply = lambda request: bytes_reply(b"abcdefgh")
    assert await text(stop=["de"]) == "abc"
    assert await text(stop=["de"], **shows) == "abcde"
    deployment.router.reply = lambda request: Reply([[97], [98], [256]], finish=STOP)
    assert await text(stop_token_ids=[98], **shows) == "ab"
    assert await text(**shows) == "ab"  # the token is special
    assert await text(skip_special_tokens=False) == "ab"
    assert await text(skip_special_tokens=False, **shows) == "ab<|end|>"
    deployment.router.reply = lambda request: Reply([[97], [258], [98]])
    assert await text() == "ab"
    assert await text(skip_special_tokens=False) == "a<|user|>b"


async def test_a_chat_goes_on_with_its_last_message(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    body = {"model": "mock", "messages": messages, "continue_final_message": True}
    await deployment.http.post("/v1/chat/completions", json=body)
    sent = list(deployment.router.submissions[0].request.token_ids)
    assert sent == [258, *b"Hi", 256, 259, *b"So"]
