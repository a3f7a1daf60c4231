"""How many prompt tokens fit in the time that a step may take, learned from steps that ran."""

_MIN_TOKENS = 32  # a chunk is never cut below this: small ones cost more than they spare
_FIRST_TOKENS = 64  # of a step before any was timed: a slow machine must not stall on it
_WEIGHT = 0.3  # of the newest observation
_UNSHARED = 2  # times as long where no token waits for the step: longer chunks cost less a token


class StepTime:
    """An exponential mean of seconds a prompt token. Nothing known yet: a small first chunk."""

    def __init__(self, max_step_s: float) -> None:
        self.max_step_s = max_step_s
        self.token_s = 0.0

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
