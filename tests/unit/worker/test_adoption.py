"""What a reader makes of the errors of its source."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import (
    Cancelled,
    EngineFailure,
    InvalidRequest,
    KvUnavailable,
    Overloaded,
    PacelineError,
)
from paceline.engine.messages import GrantedRun, Reserved
from paceline.rpc.convert import error_to_proto
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.adoption import Adoption


class Progress:
    """Of a source whose prefill has failed."""

    def __init__(self, error: PacelineError) -> None:
        self._error = error

    async def __aiter__(self) -> AsyncIterator[kv_pb2.ProgressEvent]:
        yield kv_pb2.ProgressEvent(error=error_to_proto(self._error))

    def cancel(self) -> None:
        pass


async def end_of(failure: PacelineError) -> PacelineError:
    """How the reader's slot ends."""
    ends: list[PacelineError] = []

    async def get(ticket: object, endpoint: str) -> Any:
        return SimpleNamespace(progress=lambda _: Progress(failure))

    session: Any = SimpleNamespace(
        peers=SimpleNamespace(get=get),
        metrics=SimpleNamespace(failures=SimpleNamespace(inc=lambda: None)),
        end=lambda slot, error: ends.append(error),
    )
    request = SimpleNamespace(root_key=bytes(32), token_ids=[1, 2, 3])
    slot: Any = SimpleNamespace(request=request, reserved=Reserved(1, 0, [GrantedRun(0, [5])]))
    await Adoption(session, slot, common_pb2.Ticket(), "source:1").finished()
    (end,) = ends
    return end


@pytest.mark.parametrize("failure", [EngineFailure("a bug"), Cancelled("has ended")])
async def test_when_the_source_fails_the_router_plans_again(failure: PacelineError) -> None:
    end = await end_of(failure)
    assert isinstance(end, KvUnavailable) and failure.message in end.message


@pytest.mark.parametrize("failure", [InvalidRequest("n", 7, "too much"), Overloaded("pins")])
async def test_what_is_no_fault_of_the_source_keeps_its_kind(failure: PacelineError) -> None:
    end = await end_of(failure)
    assert (type(end), end.message, end.field) == (type(failure), failure.message, failure.field)
