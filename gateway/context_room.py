"""A prompt, and its output if there is one, against the model's context."""

from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import ContextLengthExceeded


class Room(Protocol):
    """What a prompt may fill."""

    @property
    def prompt_field(self) -> str:
        """At fault when the prompt alone is."""
        ...

    @property
    def max_prompt_tokens(self) -> int: ...

    def check(self, num_prompt_tokens: int, *, is_least: bool = False) -> None:
        """Raises ContextLengthExceeded. `is_least`: the prompt has so many tokens or more."""
        ...


@dataclass(frozen=True, slots=True)
class ContextRoom:
    """What one request may fill of the context. Counts are tokens."""

    context_length: int
    prompt_field: str  # at fault when the prompt alone is too long
    max_tokens: int | None  # asked for; None: clipped to what is left
    default_max_tokens: int | None = None  # None: all that is left

    @property
    def max_prompt_tokens(self) -> int:
        return self.context_length - max(self.max_tokens or 1, 1)

    def check(self, num_prompt_tokens: int, *, is_least: bool = False) -> None:
        """Raises ContextLengthExceeded. `is_least`: the prompt has so many tokens or more."""
        room = self.context_length - num_prompt_tokens
        at_least = "at least " if is_least else ""
        if room < 1:
            reason = f"the prompt leaves no room in the context of {self.context_length} tokens"
            value = f"{at_least}{num_prompt_tokens} tokens"
            raise ContextLengthExceeded(self.prompt_field, value, reason)
        if self.max_tokens is not None and self.max_tokens > room:
            reason = (
                f"with {at_least}{num_prompt_tokens} prompt tokens that is "
                f"{num_prompt_tokens + self.max_tokens} tokens, more than the context of "
                f"{self.context_length}; at most {room} fit"
            )
            raise ContextLengthExceeded("max_tokens", self.max_tokens, reason)

    def max_tokens_after(self, num_prompt_tokens: int) -> int:
        """For a prompt that passed `check`."""
        if self.max_tokens is not None:
            return self.max_tokens
        room = self.context_length - num_prompt_tokens
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)


@dataclass(frozen=True, slots=True)
class InputRoom:
    """The whole context: no token comes after an input that is embedded."""

    context_length: int
    prompt_field: str

    @property
    def max_prompt_tokens(self) -> int:
        return self.context_length

    def check(self, num_prompt_tokens: int, *, is_least: bool = False) -> None:
        if num_prompt_tokens > self.context_length:
            value = f"{'at least ' if is_least else ''}{num_prompt_tokens} tokens"
            reason = f"the context holds {self.context_length} tokens"
            raise ContextLengthExceeded(self.prompt_field, value, reason)
