"""How many prompt tokens fit in the time that a step may take, learned from steps that ran.

Without a target for the latency between tokens a mean of seconds a token is enough, and chunks are
as long as `max_step_s` allows. With one, a step that brings streams forward is predicted from all
that it computes, and its chunks end where the target does, less what predictions are exceeded by.

A stream that hopes for a time between its tokens makes that the target of the steps it is in, if
that is less. However little it hopes for, a step may take LEAST_STEPS times what its streams take
without prompts, so that these get half of the time at least.
"""

from collections.abc import Iterable

from paceline.engine.step_model import Chunk, StepModel

_MIN_TOKENS = 32  # a chunk is never cut below this: small ones cost more than they spare
_FIRST_TOKENS = 64  # of a step before any was timed: a slow machine must not stall on it
_WEIGHT = 0.3  # of the newest observation
LEAST_STEPS = 2
_UNSHARED = 2  # times as long where no token waits for the step: longer chunks cost less a token


class StepBudget:
    """What a step still has for prompts: tokens, and if there is a model what its `num_decodes`
    streams leave of `target_s`."""

    def __init__(
        self,
        num_tokens: int,
        model: StepModel | None = None,
        num_decodes: int = 0,
        target_s: float = 0.0,
    ) -> None:
        self.num_tokens = num_tokens
        self._model = model
        self._num_decodes = num_decodes
        self._target_s = target_s
        self._spent_s = 0.0
        self._is_untouched = True

    @property
    def is_spent(self) -> bool:
        if self._model is None or self._is_untouched:
            return self.num_tokens <= 0
        return self.num_tokens <= 0 or self._seconds_left(self._model) <= 0

    def tokens_behind(self, context: int) -> int:
        """Of a prompt that is computed so far. The first one gets some in any case."""
        if self._model is None:
            return self.num_tokens
        fitting = self._model.tokens_within(self._seconds_left(self._model), context)
        least = _MIN_TOKENS if self._is_untouched else 0
        return min(self.num_tokens, max(fitting, least))

    def spend(self, num_tokens: int, context: int) -> None:
        self.num_tokens -= num_tokens
        self._is_untouched = False
        if self._model is not None:
            self._spent_s += self._model.chunk_seconds(num_tokens, context)

    def _seconds_left(self, model: StepModel) -> float:
        limit_s = self._target_s / (1 + model.excess)
        return model.room(self._num_decodes, limit_s) - self._spent_s


class StepTime:
    """An exponential mean of seconds a prompt token. Nothing known yet: a small first chunk.

    `itl_target_s`: at most, from one token of a stream to the next; 0: no target."""

    def __init__(self, max_step_s: float, itl_target_s: float = 0.0) -> None:
        self.max_step_s = max_step_s
        self.itl_target_s = itl_target_s
        self.token_s = 0.0
        self.tested_token_s = 0.0  # of a short chunk, before the first step: sizes none
        self.model = StepModel() if itl_target_s else None

    def budget(self, max_tokens: int, num_decodes: int, hoped_s: float = 0.0) -> StepBudget:
        """Of a step with at most `max_tokens` of prompts beside `num_decodes` streams, one of which
        hopes for `hoped_s` between tokens; 0: none says anything."""
        num_tokens = min(max_tokens, self.max_chunk_tokens(decodes=num_decodes > 0))
        if hoped_s and self.model is None:
            self.model = StepModel()  # learns from here on
        if self.model is None or not num_decodes or not self.model.longest:
            return StepBudget(num_tokens)
        target_s = self.itl_target_s
        if hoped_s:
            hoped_s = max(hoped_s, LEAST_STEPS * self.model.seconds(num_decodes))
            target_s = min(target_s, hoped_s) if target_s else hoped_s
        return (
            StepBudget(num_tokens, self.model, num_decodes, target_s)
            if target_s
            else StepBudget(num_tokens)
        )

    def max_chunk_tokens(self, *, decodes: bool) -> int:
        """`decodes`: the step brings forward sequences that decode, too."""
        if not self.token_s:
            return _FIRST_TOKENS
        max_step_s = self.max_step_s * (1 if decodes else _UNSHARED)
        return max(_MIN_TOKENS, int(max_step_s / self.token_s))

    def of(self, num_chunk_tokens: int) -> float:
        """Seconds that a step with so many prompt tokens takes, as far as is known."""
        return self.token_s * num_chunk_tokens

    def observe(self, num_chunk_tokens: int, step_s: float) -> None:
        if num_chunk_tokens < _MIN_TOKENS:
            return
        observed = step_s / num_chunk_tokens
        self.token_s += (observed - self.token_s) * (_WEIGHT if self.token_s else 1.0)

    def observe_interval(self, num_decodes: int, chunks: Iterable[Chunk], seconds: float) -> None:
        """From the end of the step before, if streams waited for this one, to its own."""
        if self.model is not None:
            self.model.observe(num_decodes, chunks, seconds)
