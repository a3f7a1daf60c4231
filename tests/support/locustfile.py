"""What users of Locust do: streams and whole answers, each looked at. For `locust -f`."""

import os
import random
from typing import Any

from locust import FastHttpUser, task

NUM_TOKENS = 16
_OPTIONS = {"max_tokens": NUM_TOKENS, "temperature": 0.8, "ignore_eos": True}


class Reader(FastHttpUser):
    """Asks again as soon as it has its answer."""

    @task
    def chat(self) -> None:
        body = self._body(messages=[{"role": "user", "content": self._text()}])
        with self._post("/v1/chat/completions", "chat", body) as answer:
            if answer.json()["usage"]["completion_tokens"] != NUM_TOKENS:
                answer.failure("too short")

    @task
    def stream(self) -> None:
        body = self._body(messages=[{"role": "user", "content": self._text()}], stream=True)
        with self._post("/v1/chat/completions", "stream", body) as answer:
            if not answer.text.endswith("data: [DONE]\n\n") or '"error"' in answer.text:
                answer.failure("cut")

    @task
    def completion(self) -> None:
        with self._post("/v1/completions", "completion", self._body(prompt="Hi")) as answer:
            if answer.json()["choices"][0]["finish_reason"] != "length":
                answer.failure("too short")

    def _post(self, path: str, name: str, body: dict[str, Any]) -> Any:
        return self.client.post(path, name=name, json=body, catch_response=True)

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"model": os.environ["MODEL"], **_OPTIONS, **fields}

    def _text(self) -> str:
        return " ".join(random.choices(("red", "and", "Grüße"), k=random.randint(1, 100)))
