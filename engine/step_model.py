"""How long a step takes, learned from the last ones that ran.

    seconds ≈ base + decode · D + mixed · [n > 0] + token · n + pair · n · context

D sequences decode beside n prompt tokens, whose mean context is that of the token in their middle.
The five coefficients are fitted to relative errors, none negative; steps far off the others, which
waited for something else, hardly count. Chunks that fill the same time step after step leave some
directions open: there the smallest coefficients are taken, which say the same of such steps.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_NUM_MIXED, _NUM_PURE = 64, 32  # steps that are remembered, with prompt tokens and without
_RIDGE = 1e-4  # of the weight of all steps, where they leave a direction open
_LEAST_ERROR = 0.01  # relative; steps that err by less than three of these all count alike
_GROWTH = 4  # times the longest chunk seen: farther than that a line is not to be trusted
_EXCEEDING = 0.02  # share of steps that exceed their prediction by more than `excess`
_FIRST_EXCESS, _MOST_EXCESS = 0.03, 0.3
_EXCESS_RATE = 0.5  # of what it changes by, relative to itself and a little
_LITTLE_EXCESS = 0.02

Chunk = tuple[int, int]  # tokens, and context before them
Floats = NDArray[np.float64]


class _Steps:
    """The last of a kind."""

    def __init__(self, num_steps: int) -> None:
        self._features = np.zeros((num_steps, 5))
        self._seconds = np.zeros(num_steps)
        self._num_added = 0

    def add(self, features: Floats, seconds: float) -> None:
        place = self._num_added % len(self._seconds)
        self._features[place], self._seconds[place] = features, seconds
        self._num_added += 1

    @property
    def features(self) -> Floats:
        return self._features[: self._num_added]

    @property
    def seconds(self) -> Floats:
        return self._seconds[: self._num_added]


class StepModel:
    """`excess`: by how much steps with prompts exceed what was predicted, relative; few by more."""

    def __init__(self) -> None:
        self._mixed, self._pure = _Steps(_NUM_MIXED), _Steps(_NUM_PURE)
        self._coefficients = np.zeros(5)
        self._is_fitted = True
        self.excess = _FIRST_EXCESS

    @property
    def longest(self) -> int:
        """Prompt tokens of a step that is remembered; 0 if none is."""
        return int(self._mixed.features[:, 3].max(initial=0))

    def seconds(self, num_decodes: int, chunks: Iterable[Chunk] = ()) -> float:
        self._fit()
        return float(_features(num_decodes, chunks) @ self._coefficients)

    def room(self, num_decodes: int, limit_s: float) -> float:
        """Seconds for prompt tokens in a step with prompt tokens that shall take `limit_s`."""
        self._fit()
        base, decode, mixed = self._coefficients[:3].tolist()
        return float(limit_s - base - decode * num_decodes - mixed)

    def chunk_seconds(self, num_tokens: int, context: int) -> float:
        self._fit()
        token, pair = self._coefficients[3:].tolist()
        return float(token * num_tokens + pair * num_tokens * (context + num_tokens / 2))

    def tokens_within(self, seconds: float, context: int) -> int:
        """The most tokens behind `context` that take no longer."""
        self._fit()
        token, pair = self._coefficients[3:].tolist()
        most = _GROWTH * self.longest
        if seconds <= 0:
            return 0
        linear = token + pair * context  # pair / 2 · n² + linear · n = seconds
        denominator = linear + (linear**2 + 2 * pair * seconds) ** 0.5
        return min(most, int(2 * seconds / denominator)) if denominator > 0 else most

    def observe(self, num_decodes: int, chunks: Iterable[Chunk], step_s: float) -> None:
        x = _features(num_decodes, chunks)
        step_s = max(step_s, 1e-6)
        predicted = float(x @ self._coefficients)
        if x[2] and self.longest and step_s < 2 * predicted:  # others waited for something else
            self._learn_excess(step_s / predicted - 1)
        (self._mixed if x[2] else self._pure).add(x, step_s)
        self._is_fitted = False

    def _learn_excess(self, error: float) -> None:
        """Rises much when it is exceeded and falls a little otherwise: in balance at _EXCEEDING."""
        change = 1 - _EXCEEDING if error > self.excess else -_EXCEEDING
        excess = self.excess + _EXCESS_RATE * change * (self.excess + _LITTLE_EXCESS)
        self.excess = min(max(excess, 0.0), _MOST_EXCESS)

    def _fit(self) -> None:
        """When somebody asks: most steps have no prompts beside them. Which steps are far off
        follows from the fit before."""
        if self._is_fitted:
            return
        self._is_fitted = True
        x = np.concatenate((self._pure.features, self._mixed.features))
        seconds = np.concatenate((self._pure.seconds, self._mixed.seconds))
        x /= seconds[:, None]  # errors are relative
        errors = 1 - x @ self._coefficients
        usual = max(float(np.median(np.abs(errors))), _LEAST_ERROR)
        self._coefficients = _least_squares(x, 1 / (1 + (errors / (3 * usual)) ** 2))


def _least_squares(x: Floats, weights: Floats) -> Floats:
    """The smallest coefficients ≥ 0 with x @ coefficients ≈ 1."""
    sizes = np.sqrt((x**2).mean(axis=0))
    used = sizes > 0
    solution = np.zeros(x.shape[1])
    while used.any():
        scaled = x[:, used] / sizes[used]
        normal = scaled.T @ (scaled * weights[:, None])
        normal += _RIDGE * weights.sum() * np.eye(len(normal))
        found = np.linalg.solve(normal, scaled.T @ weights)
        if found.min() >= 0:
            solution[used] = found / sizes[used]
            break
        used[np.flatnonzero(used)[found.argmin()]] = False
    return solution


def _features(num_decodes: int, chunks: Iterable[Chunk]) -> Floats:
    num_tokens, pairs = 0, 0.0
    for num, context in chunks:
        num_tokens += num
        pairs += num * (context + num / 2)
    return np.array([1.0, num_decodes, float(num_tokens > 0), num_tokens, pairs])
