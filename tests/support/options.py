"""Requests with each option of sampling, and all that their answers say, for comparison."""

from typing import Any

from benchmarks.answer import Answer

MAX_TOKENS = 50
ROUNDING = 1e-4  # of logprobs


def with_options(tokens: list[int], text: str, *, reads_text: bool) -> dict[str, dict[str, Any]]:
    """By name: fields of a request. Some refer to what it answers greedily: `tokens`, `text`.
    `reads_text`: the model's tokenizer can do more than show tokens."""
    words = text.split()
    stop = f"{words[35][-2:]} {words[36][:2]}"  # across two tokens
    late = max(i for i, token in enumerate(tokens[:40]) if token not in tokens[:i])
    banned = [words[12], f"{words[20]} {words[21]}"]
    allowed = {"name": "allowed_token_ids", "arguments": {"token_ids": list(range(300, 1300))}}
    warm = {"temperature": 1.0}
    bad_words = {"bad words": {"temperature": 0, "bad_words": banned, "logprobs": 1}}
    return {
        **(bad_words if reads_text else {}),
        "greedy": {"temperature": 0},
        "seed": {**warm, "seed": 5},
        "choices": {**warm, "seed": 6, "n": 3, "logprobs": 2},
        "filters": {**warm, "seed": 7, "top_p": 0.9, "top_k": 900, "min_p": 1e-7, "typical_p": 0.9},
        "logprobs": {**warm, "seed": 8, "logprobs": 4},
        "repetition": {"temperature": 0.2, "seed": 9, "repetition_penalty": 1.8, "logprobs": 1},
        "presence": {"temperature": 0.2, "seed": 10, "presence_penalty": 2.0, "logprobs": 1},
        "frequency": {"temperature": 0.2, "seed": 11, "frequency_penalty": 2.0, "n": 2},
        "stop": {"temperature": 0, "stop": [stop]},
        "shown stop": {"temperature": 0, "stop": [stop], "include_stop_str_in_output": True},
        "least tokens": {"temperature": 0, "stop_token_ids": tokens[10:13], "min_tokens": 40},
        "stop token": {"temperature": 0, "stop_token_ids": [tokens[late]]},
        "bias": {**warm, "seed": 12, "logit_bias": {"301": 9.0, "302": 9.0, str(tokens[3]): -100}},
        "processor": {**warm, "seed": 13, "logits_processors": [allowed]},
        "prompt": {"temperature": 0, "prompt_logprobs": 2, "stream": False},
        "echo": {"temperature": 0, "echo": True, "logprobs": 1, "stream": False},
    }


def said(answer: Answer) -> dict[str, Any]:
    """All of an answer but for its pieces, times and cached tokens."""
    assert not answer.error, answer.error
    indices = sorted({choice["index"] for event in answer.events for choice in event.choices})
    usage = answer.usage or {}
    return {
        "choices": {index: _choice(answer, index) for index in indices},
        "usage": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


def _choice(answer: Answer, index: int) -> dict[str, Any]:
    parts = [c for event in answer.events for c in event.choices if c["index"] == index]
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    names = sorted(logprobs[0]) if logprobs else []
    return {
        "text": answer.text(index),
        "token_ids": answer.token_ids(index),
        "finish": answer.finish(index),
        "prompt_logprobs": [p["prompt_logprobs"] for p in parts if p.get("prompt_logprobs")],
        **{name: [value for part in logprobs for value in part[name] or ()] for name in names},
    }


def difference(found: Any, expected: Any, where: str = "") -> str:
    """Where two answers differ first by more than rounding; empty: nowhere."""
    if isinstance(expected, float) and isinstance(found, float):
        return "" if abs(found - expected) <= ROUNDING else f"{where}: {found} for {expected}"
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        pairs = [(found[key], expected[key], f"{where}/{key}") for key in expected]
    elif isinstance(expected, list | tuple) and type(found) is type(expected):
        if len(found) != len(expected):
            return f"{where}: {len(found)} for {len(expected)} entries"
        pairs = [
            (f, e, f"{where}/{i}") for i, (f, e) in enumerate(zip(found, expected, strict=True))
        ]
    else:
        return "" if found == expected else f"{where}: {found!r} for {expected!r}"
    return next(filter(None, (difference(*pair) for pair in pairs)), "")
