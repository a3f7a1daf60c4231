"""What `paceline rebalance` makes of what routers tell, or do not tell."""

import pytest
from structlog.testing import capture_logs

from paceline.cli.rebalance import RebalanceConfig, Rebalancer, revisions_of
from paceline.core.config import parse
from paceline.core.errors import ConfigError
from paceline.v1 import control_pb2, worker_pb2
from tests.support.workers import free_port

SECRET = {"PACELINE_REBALANCE_SECRET": "s" * 32}


def parsed(*arguments: str) -> RebalanceConfig:
    return parse(RebalanceConfig, arguments, SECRET, "rebalance")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prefill-s", "0"), "prefill_s=0.0: must be positive"),
        (("--decode-share", "1.5"), "decode_share=1.5: must be at most 1"),
        (("--hold-s", "-1"), "hold_s=-1.0: must not be negative"),
        (("--router", ""), "router=(): must name one at least"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(*arguments)
    assert refused.value.message == said


async def test_routers_without_an_address_or_an_answer_are_waited_for() -> None:
    config = parsed(f"--router=no-such-host.invalid:9100,127.0.0.1:{free_port()}")
    rebalancer = Rebalancer(config)
    with capture_logs() as logs:
        await rebalancer.look()
        await rebalancer.look()
    assert rebalancer.reasons() == ["no router answers"]
    (told,) = logs
    assert told["event"] == "no router answers" and "the peer does not answer" in told["why"]


def told(*workers: tuple[str, str, bool], num_queued: int = 0) -> control_pb2.WorkersResponse:
    response = control_pb2.WorkersResponse(num_queued_by_digest={"ab": num_queued})
    for name, digest, is_usable in workers:
        info = worker_pb2.WorkerInfo(
            worker_id=name, content_digest=digest, role=worker_pb2.ROLE_DECODE
        )
        load = worker_pb2.Load(num_pages=10, num_free_pages=10)
        response.workers.add(info=info, load=load, is_usable=is_usable)
    return response


def test_what_several_routers_tell_is_put_together_by_revision() -> None:
    first = told(("d0", "ab", False), ("d1", "ab", True), num_queued=4)
    second = told(("d0", "ab", True), ("d1", "ab", False), ("e0", "cd", True), num_queued=4)
    revisions = revisions_of([first, second], parsed().wanted)
    names = {
        digest: [worker.info.worker_id for worker in sides.decode.workers]
        for digest, sides in revisions.items()
    }
    assert names == {"ab": ["d0", "d1"], "cd": ["e0"]}
    assert revisions["ab"].decode.load == pytest.approx(1 / 0.8), "all queues count"
    assert not revisions["cd"].decode.load, "what waits for one model moves no worker of another"


def test_a_worker_is_known_by_the_latest_news_of_its_role() -> None:
    """Whichever router has it: a change names the version that it was decided on."""
    old, new = told(("d0", "ab", True)), told(("d0", "ab", True))
    new.workers[0].info.role, new.workers[0].info.role_version = worker_pb2.ROLE_PREFILL, 3
    for routers in ([old, new], [new, old]):
        sides = revisions_of(routers, parsed().wanted)["ab"]
        assert [worker.info.role_version for worker in sides.prefill.workers] == [3]
        assert not sides.decode.workers
