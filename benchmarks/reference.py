"""What transformers says in float32: the authority that greedy output is compared with."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """Checks greedy output by teacher forcing.

    One forward over prompt + output gives transformers' choice at each position, given our tokens
    before it. If all of them equal ours, then by induction over positions our output is its greedy
    output: at position 0 the context is the prompt alone, and at position k it is the prompt and k
    tokens that were equal. One forward instead of one a token; `generate` is the same, slower.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = cast(
            Any, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train(False)
        )
        eos = self._model.generation_config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        ids: Any = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def num_differing(self, prompt: list[int], output: list[int], max_tokens: int) -> int:
        """Positions where `output` is not greedy; tokens that are missing or too many count."""
        if not output:
            return max_tokens
        greedy = self._choices(prompt, output)
        stop = next((i for i, t in enumerate(output) if t in self.eos_token_ids), None)
        ends_early = greedy[len(output)] in self.eos_token_ids or stop is not None
        missing = 0 if ends_early else max_tokens - len(output)
        surplus = 0 if stop is None else len(output) - 1 - stop
        return sum(a != b for a, b in zip(output, greedy, strict=False)) + abs(missing) + surplus

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The output itself, a token at a time, without the final end-of-text token."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = self._model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
        output: list[int] = whole[0, len(prompt) :].tolist()
        return [token for token in output if token not in self.eos_token_ids]

    def _choices(self, prompt: list[int], output: list[int]) -> list[int]:
        """The greedy token at each position of `output`, and the one after it."""
        key = (*prompt, -1, *output)
        if key not in self._known:
            ids = torch.tensor([prompt + output])
            with torch.inference_mode():
                logits = self._model(ids, logits_to_keep=len(output) + 1).logits[0]
            self._known[key] = logits.argmax(dim=-1).tolist()
        return self._known[key]
