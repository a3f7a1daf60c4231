"""Chat templates: as transformers renders them, within bounds, refusals as the caller's error."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.gateway.chat_template import ChatTemplate, load_template
from paceline.gateway.messages import Chat, chat_of
from paceline.gateway.openai_types import ChatRequest

MESSAGES = [
    {"role": "system", "content": "Be brief <b>."},
    {"role": "user", "content": "Grüße 'x' \U0001f600\n"},
]
# SmolLM2's own template
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Alternating roles, as Llama 2 and Mistral insist on
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}[{{ message['content'] }}]{% endfor %}"
)
WHITESPACE = """
  {% for message in messages %}
    {%- if message.role == 'user' %}
U: {{ message.content | trim }}
    {%- else %}
{% generation %}S: {{ message.content | tojson }}{% endgeneration %}
    {%- endif %}
    {% if loop.last %}{% break %}{% endif %}
  {% endfor %}
{% set found = namespace(value=1) %}{% set found.value = 2 %}{{ found.value }}
"""


def template(source: str, max_chars: int = 10_000, timeout_s: float = 1.0) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, max_chars, timeout_s)


@pytest.mark.parametrize("source", [SMOLLM2, WHITESPACE, "{{ messages | tojson(indent=1) }}"])
def test_it_renders_as_transformers_does(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert template(source).render(Chat(MESSAGES)) == rendered[0]


ANSWERED = [*MESSAGES, {"role": "assistant", "content": "  Sure, here "}]
TRIMMING = SMOLLM2.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize("source", [SMOLLM2, TRIMMING, WHITESPACE.replace("tojson", "trim")])
def test_it_continues_the_last_message_as_transformers_does(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template(
        [ANSWERED], chat_template=source, continue_final_message=True, bos_token="<s>"
    )
    chat = Chat(ANSWERED, asks_for_answer=False, continues_last=True)
    assert template(source).render(chat) == rendered[0]


CALL = {
    "name": "weather",
    "arguments": '{"city": "Zürich", "days": [1, 2], "id": 12345678901234567890}',
}
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Warm"}, {"type": "text", "text": "?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "21 °C"},
    {"role": "assistant", "content": "Yes", "name": "helper"},
    {"role": "user", "content": "Thanks"},
]
# Calls as XML (Qwen, Hermes), as the object alone (Llama 3), and by id (Mistral)
TOOLS = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}",
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one at a time') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% elif m.role in ('tool', 'ipython') %}ipython: {{ m.content | tojson }}"
    "{% else %}{{ m.role }}: {{ m['content'] | trim }}{% endif %}<|eot_id|>{% endfor %}",
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}"
    "{% endfor %}#{{ c.id }}{% endfor %}{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}:{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
]


@pytest.mark.parametrize("source", TOOLS)
def test_calls_and_their_results_are_rendered_as_transformers_does(source: str) -> None:
    """Which takes arguments that have been read, and texts."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    function = {**CALL, "arguments": json.loads(CALL["arguments"])}
    call = {"id": "call_1", "type": "function", "function": function}
    theirs = [dict(message) for message in CALLED]
    theirs[1]["content"] = "Warm\n?"
    theirs[2] |= {"content": "", "tool_calls": [call]}
    rendered, _ = utils.render_jinja_template([theirs], chat_template=source, bos_token="<s>")
    body = {"model": "mock", "messages": CALLED, "add_generation_prompt": False}
    request = msgspec.convert(body, ChatRequest)
    ours = chat_of(request.messages, request, has_developer=False)
    assert template(source).render(ours) == rendered[0]


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    chat = Chat(ANSWERED, asks_for_answer=False, continues_last=True)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template("{{ messages[0].content }}").render(chat)


@pytest.mark.parametrize("roles", [["system", "user"], ["user", "user"], ["assistant"]])
def test_jan_6254_a_refused_order_of_roles_is_the_callers_error(roles: list[str]) -> None:
    """https://github.com/janhq/jan/issues/6254"""
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        template(STRICT).render(Chat(messages))
    assert caught.value.field == "messages"
    assert template(SMOLLM2).render(Chat(messages)).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(100000) %}xxxxxxxxxx{% endfor %}", "exceeds 10000 characters"),
        ("{{ messages[0].nothing.deeper }}", "has no attribute"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_failing_template_is_a_refusal(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        template(source).render(Chat(MESSAGES))


def test_a_slow_template_is_cut() -> None:
    outer, inner = "{% for i in range(99999) %}", "{% for j in range(99999) %}"
    source = outer + inner + "{{ i }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="longer than"):
        template(source, max_chars=10**9, timeout_s=0.05).render(Chat(MESSAGES))


def test_a_broken_template_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        template("{% for %}")


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named"])
def test_the_template_is_found_wherever_models_keep_it(tmp_path: Path, place: str) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "other"}
    source = "{{ bos_token }}!"
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
    elif place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    elif place == "config":
        config["chat_template"] = source
    else:
        config["chat_template"] = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": source},
        ]
    found = load_template(tmp_path, config, 100, 1.0)
    assert found is not None and found.render(Chat(MESSAGES)) == "<s>!"
    assert load_template(tmp_path / "none", {}, 100, 1.0) is None
