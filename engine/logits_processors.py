"""Logits processors by name: the operator's code, which requests name and give arguments to.

A package offers one by an entry point in the group `paceline.logits_processors`:

    [project.entry-points."paceline.logits_processors"]
    my_name = "my_package.module:MyProcessor"

All are loaded when an engine starts; no two may have the same name. What a processor does must
depend on arguments and tokens alone: the same request then gives the same tokens on any worker.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.core.sampling import LogitsProcessorCall

GROUP = "paceline.logits_processors"
_log = structlog.get_logger("paceline.rank")
_BUILTIN = {"allowed_token_ids": "paceline.engine.allowed_token_ids:AllowedTokenIds"}


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """Of one row of logits: what `prepare` made of its request's arguments, and its tokens."""

    prepared: Any
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]


class LogitsProcessor(Protocol):
    """Made once an engine, of the vocabulary's size; used by its step loop and command threads."""

    def prepare(self, arguments: Mapping[str, Any]) -> Any:
        """Checks a request's arguments when it comes. Raises InvalidRequest."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Changes logits [len(rows), vocab], float32, in place: every step, all its rows at once.

        After an exception each row is tried by itself; a request over whose row it throws again
        ends, and no other.
        """
        ...


@dataclass(frozen=True, slots=True)
class PreparedCall:
    name: str
    processor: LogitsProcessor
    prepared: Any

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> bool:
        """False if it throws, which leaves anything in `logits`: foreign code must not end the
        rank."""
        try:
            self.processor.apply(logits, rows)
        except Exception:  # foreign code, which must not end the rank
            _log.exception("a logits processor failed", name=self.name, num_rows=len(rows))
            return False
        return True


class ProcessorTable:
    """Raises ConfigError for one that cannot be loaded, and for a name that is given twice."""

    def __init__(self, vocab_size: int) -> None:
        found = dict(_BUILTIN)
        for point in entry_points(group=GROUP):
            if point.name in found:
                reason = f"stands for {found[point.name]} and for {point.value}"
                raise ConfigError("logits_processors", point.name, reason)
            found[point.name] = point.value
        self._processors = {name: _make(name, value, vocab_size) for name, value in found.items()}

    def prepare(self, call: LogitsProcessorCall) -> PreparedCall:
        """Raises InvalidRequest for a name that nobody registered, or wrong arguments."""
        processor = self._processors.get(call.name)
        if processor is None:
            reason = f"is not registered; there are {', '.join(sorted(self._processors))}"
            raise InvalidRequest("logits_processors", call.name, reason)
        arguments = json.loads(call.arguments)
        try:
            return PreparedCall(call.name, processor, processor.prepare(arguments))
        except InvalidRequest:
            raise
        except Exception as error:  # foreign code, which must not end the rank
            _log.warning("a logits processor failed to prepare", name=call.name, error=repr(error))
            reason = f"does not take these arguments: {type(error).__name__}"
            raise InvalidRequest("logits_processors", call.name, reason) from error


def _make(name: str, factory: str, vocab_size: int) -> LogitsProcessor:
    module, _, attribute = factory.partition(":")
    try:
        make: Callable[[int], LogitsProcessor] = getattr(importlib.import_module(module), attribute)
        return make(vocab_size)
    except Exception as error:  # foreign code
        raise ConfigError("logits_processors", name, f"cannot be loaded: {error}") from error
