"""Stop strings across token borders: hold back only text that may become one.

Each stop string is matched by its Knuth-Morris-Pratt automaton, fed character by character. Its
state is the length of the longest prefix of the stop string that the text ends with: exactly what
must be held back. The first stop string to be complete wins (the longest, if several end there).
Time is linear in the text, whatever the strings.
"""

from collections.abc import Sequence


class StopAutomaton:
    """One stop string, prepared once a request and shared by its choices."""

    __slots__ = ("failure", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.failure = _failure_table(text)

    def step(self, state: int, character: str) -> int:
        """State after `character`; len(text) means complete."""
        text, failure = self.text, self.failure
        while state and (state == len(text) or text[state] != character):
            state = failure[state - 1]
        return state + 1 if text[state] == character else 0


class StopMatcher:
    """Feeds on the text of one choice; says what may be shown."""

    __slots__ = ("_automata", "_held", "_is_shown", "_states", "stopped")

    def __init__(self, automata: Sequence[StopAutomaton], *, is_shown: bool = False) -> None:
        self._automata = automata
        self._is_shown = is_shown  # the stop string itself
        self._states = [0] * len(automata)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that can be shown now. When `stopped` is set, it ends at a stop string."""
        if not self._automata:
            return text
        pending = self._held + text
        end = len(self._held)
        for character in text:
            end += 1
            matched = self._step(character)
            if matched:
                self.stopped = True
                self._held = ""
                return pending[: end if self._is_shown else end - matched]
        num_held = max(self._states, default=0)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def _step(self, character: str) -> int:
        """Length of the longest stop string that `character` completes, or 0."""
        matched = 0
        for index, automaton in enumerate(self._automata):
            state = automaton.step(self._states[index], character)
            self._states[index] = state
            if state == len(automaton.text):
                matched = max(matched, state)
        return matched

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held


def _failure_table(text: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of text[: i + 1] that is also its suffix."""
    failure = [0] * len(text)
    matched = 0
    for i in range(1, len(text)):
        while matched and text[i] != text[matched]:
            matched = failure[matched - 1]
        if text[i] == text[matched]:
            matched += 1
        failure[i] = matched
    return failure
