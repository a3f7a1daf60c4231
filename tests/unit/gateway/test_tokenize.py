"""/tokenize and /detokenize in vLLM's form."""

from typing import Any

import pytest

from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"role": "tool", "content": "x"}
MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = [258, *b"Hi", 256]  # <|user|>Hi<|end|>


async def tokenize(deployment: Deployment, **body: Any) -> Any:
    return (await deployment.http.post("/tokenize", json=body)).json()


async def test_a_text(deployment: Deployment) -> None:
    found = await tokenize(deployment, model="mock", prompt="é!")
    assert found == {
        "count": 3,
        "max_model_len": CONTEXT_LENGTH,
        "tokens": [0xC3, 0xA9, 33],
        "token_strs": None,
    }
    named = await tokenize(deployment, prompt="é<|end|>", return_token_strs=True)
    assert named["token_strs"] == ["Ã", "©", "<|end|>"]
    assert (await tokenize(deployment, prompt=""))["tokens"] == []


async def test_a_chat(deployment: Deployment) -> None:
    assert (await tokenize(deployment, messages=MESSAGES))["tokens"] == [*RENDERED, 259]
    bare = await tokenize(deployment, messages=MESSAGES, add_generation_prompt=False)
    assert bare["tokens"] == RENDERED
    begun = [*MESSAGES, {"role": "assistant", "content": "So"}]
    continued = await tokenize(deployment, messages=begun, continue_final_message=True)
    assert continued["tokens"] == [*RENDERED, 259, *b"So"]


@pytest.mark.parametrize("extra", [{}, {"add_generation_prompt": False}])
async def test_vllm_40689_it_gives_exactly_the_count_that_is_checked(
    deployment: Deployment, extra: dict[str, Any]
) -> None:
    """https://github.com/vllm-project/vllm/issues/40689

    len(prompt) + max_tokens = limit - 1, limit, limit + 1, with and without template switches."""
    chat = {"messages": [{"role": "user", "content": "x" * 100}], **extra}
    for path, prompt in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "xyz"})):
        found = await tokenize(deployment, **prompt)
        room = found["max_model_len"] - found["count"]
        for max_tokens in (room - 1, room, room + 1):
            body = {"model": "mock", "max_tokens": max_tokens, **prompt}
            answer = await deployment.http.post(path, json=body)
            assert answer.status_code == (400 if max_tokens > room else 200), answer.text
        message = answer.json()["error"]["message"]
        assert f"{found['count']} prompt tokens" in message and str(CONTEXT_LENGTH) in message
    sent = {len(submission.request.token_ids) for submission in deployment.router.submissions}
    assert found["count"] in sent


async def test_text_comes_back(deployment: Deployment) -> None:
    text = "Grüße 😀<|end|>\x00 "
    tokens = (await tokenize(deployment, prompt=text))["tokens"]
    answer = await deployment.http.post("/detokenize", json={"model": "mock", "tokens": tokens})
    assert answer.json() == {"prompt": text}
    for tokens in ([], [65] * CONTEXT_LENGTH):
        answer = await deployment.http.post("/detokenize", json={"tokens": tokens})
        assert answer.json() == {"prompt": "A" * len(tokens)}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "model": "none"}, 404, "model"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "promt": "x"}, 400, "promt"),
        ("/tokenize", {"messages": [TOOL]}, 400, "messages[0].tool_call_id"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**64]}, 400, "tokens"),
        ("/detokenize", {"tokens": [0, 260, 1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [0] * (CONTEXT_LENGTH + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_refusals_name_the_field(
    deployment: Deployment, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await deployment.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not deployment.router.submissions
