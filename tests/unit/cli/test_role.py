"""What `paceline role` makes of its arguments."""

import pytest

from paceline.cli.role import RoleConfig, check_decode_is_left
from paceline.core.config import parse
from paceline.core.errors import ConfigError, InvalidRequest
from paceline.v1 import control_pb2, worker_pb2

SECRET = {"PACELINE_ROLE_SECRET": "s" * 32}


def parsed(*arguments: str) -> RoleConfig:
    return parse(RoleConfig, arguments, SECRET, "role")


def test_worker_and_role_need_no_names_and_wait_needs_no_value() -> None:
    config = parsed("decode-0", "prefill", "--wait")
    assert (config.worker, config.role, config.wait) == ("decode-0", "prefill", True)
    assert parsed().worker == ""
    assert not parsed("decode-0", "prefill", "--wait", "false").wait


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("decode-0",), "role='': must be prefill, decode or both"),
        (("decode-0", "encode"), "role='encode': must be prefill, decode or both"),
        (("decode-0", "both", "--drain-s", "-1"), "drain_s=-1.0: must lie between"),
        (("decode-0", "both", "--router", "here"), "router='here': must be host:port"),
        (("decode-0", "both", "--router", "h:99999"), "router='h:99999': must be host:port"),
    ],
)
def test_a_wrong_one_is_named_with_its_value(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(*arguments)
    assert refused.value.message.startswith(said)


def known(worker_id: str, role: str, **fields: object) -> control_pb2.KnownWorker:
    info = worker_pb2.WorkerInfo(worker_id=worker_id, role=f"ROLE_{role}", content_digest="ab")
    return control_pb2.KnownWorker(info=info, **{"is_usable": True, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("others", "is_left"),
    [
        ([], False),
        ([known("d1", "DECODE")], True),
        ([known("b0", "BOTH")], True),
        ([known("p0", "PREFILL")], False),
        ([known("d1", "DECODE", is_usable=False)], False),
    ],
)
def test_the_last_one_that_decodes_keeps_its_role(
    others: list[control_pb2.KnownWorker], is_left: bool
) -> None:
    worker = known("d0", "DECODE")
    if is_left:
        check_decode_is_left(worker.info, [worker, *others])
        return
    with pytest.raises(InvalidRequest, match="role='prefill': nobody else decodes"):
        check_decode_is_left(worker.info, [worker, *others])
