"""How long prompts take on a worker, learned from those that did.

A prompt of `n` tokens behind `c` that are cached takes  a x n + b x n x (c + n / 2)  seconds: each
token, and each pair of a token with one that it sees. Both come from a least-squares fit over the
prompts that had nobody before them; recent ones weigh more, and an error of a long one no more,
for its length, than that of a short one.
"""

from collections.abc import Sequence

MIN_SEEN = 4  # prompts before anything is predicted by them
MAX_TOKEN_S = 10.0
FADE = 0.98  # of a prompt's weight with each one after it
MIN_NEW_TOKENS = 32  # of less the time is that of a step, not of its tokens
USUAL_TOKENS = 4096  # of the prompt by which workers are compared
ALIKE = 0.2  # paces that differ by less are the same
MAX_SLOWNESS = 8.0


class PromptPace:
    __slots__ = ("_nn", "_np", "_nt", "_pp", "_pt", "_seen", "pair_s", "token_s")

    def __init__(self) -> None:
        self.token_s = 0.0
        self.pair_s = 0.0
        self._seen = 0
        # Weighted sums of products of n, pairs and seconds.
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0

    @property
    def is_known(self) -> bool:
        return self.token_s > 0 or self.pair_s > 0

    @property
    def is_learned(self) -> bool:
        return self._seen >= MIN_SEEN

    def tell(self, token_s: float) -> None:
        """What the worker says of its steps: until enough of its prompts were seen."""
        if not self.is_learned and 0 < token_s < MAX_TOKEN_S:
            self.token_s = token_s

    def seconds(self, num_new: int, num_cached: int) -> float:
        """0 while nothing is known."""
        return num_new * (self.token_s + self.pair_s * (num_cached + num_new / 2))

    @property
    def usual_token_s(self) -> float:
        return self.seconds(USUAL_TOKENS, 0) / USUAL_TOKENS

    def note(self, num_new: int, num_cached: int, seconds: float) -> None:
        if num_new < MIN_NEW_TOKENS or seconds <= 0:
            return
        pairs, weight = num_new * (num_cached + num_new / 2), 1 / seconds
        self._nn = FADE * self._nn + weight * num_new * num_new
        self._np = FADE * self._np + weight * num_new * pairs
        self._pp = FADE * self._pp + weight * pairs * pairs
        self._nt = FADE * self._nt + num_new
        self._pt = FADE * self._pt + pairs
        self._seen += 1
        if self.is_learned:
            self._fit()

    def _fit(self) -> None:
        """Neither figure below 0."""
        nn, np, pp = self._nn, self._np, self._pp
        det = nn * pp - np * np
        token_s, pair_s = self._nt / nn, 0.0
        if det > 1e-6 * nn * pp:  # lengths differ
            pair_s = (self._pt * nn - self._nt * np) / det
            token_s = (self._nt * pp - self._pt * np) / det
            if pair_s < 0:
                token_s, pair_s = self._nt / nn, 0.0
            elif token_s < 0:
                token_s, pair_s = 0.0, self._pt / pp
        self.token_s, self.pair_s = token_s, pair_s


def mean_pace(paces: Sequence[PromptPace]) -> PromptPace:
    """Of those that were learned, if there are any: what workers tell is of the prompts and streams
    that they happened to have."""
    paces = [pace for pace in paces if pace.is_learned] or paces
    mean = PromptPace()
    mean.token_s = sum(pace.token_s for pace in paces) / len(paces)
    mean.pair_s = sum(pace.pair_s for pace in paces) / len(paces)
    return mean


def costs(pace: PromptPace, usual: PromptPace) -> tuple[float, float]:
    """Of a token and of a pair, in tokens of a usual prompt of a usual worker. Who has not been
    learned is taken for usual, and small differences for chance."""
    slowness = pace.usual_token_s / usual.usual_token_s if pace.is_learned else 1.0
    if abs(slowness - 1) < ALIKE:
        return usual.token_s / usual.usual_token_s, usual.pair_s / usual.usual_token_s
    unit = usual.usual_token_s * max(1.0, slowness / MAX_SLOWNESS)
    return pace.token_s / unit, pace.pair_s / unit
