"""What waits for a gateway leaves in frames that gRPC takes, and has a bound in bytes."""

from paceline.router import gateway_stream
from paceline.router.gateway_stream import MAX_FRAME_BYTES, MAX_OUTBOX_BYTES, GatewayStream
from paceline.rpc.channel import MAX_MESSAGE_BYTES
from paceline.v1 import common_pb2, control_pb2


def scores(position: int, num_positions: int = 150) -> common_pb2.Emission:
    """Log probabilities of a part of a prompt, 20 others each: some 32 KB."""
    token = common_pb2.TokenLogprob(token_id=100_000, logprob=-1.5)
    entry = common_pb2.PositionLogprobs(chosen=token, top=[token] * 20, rank=7)
    part = common_pb2.PromptLogprobs(first_position=position, positions=[entry] * num_positions)
    return common_pb2.Emission(slot=1, prompt_logprobs=part)


async def frames_of(stream: GatewayStream, num_emissions: int) -> list[control_pb2.RouterFrame]:
    frames, source = [], stream.frames()
    while sum(len(frame.emissions) for frame in frames) < num_emissions:
        frames.append(await anext(source))
    return frames


async def test_frames_of_large_emissions_fit_grpc() -> None:
    stream = GatewayStream([])
    for position in range(700):
        stream.emit(scores(position))
    frames = await frames_of(stream, 700)
    assert max(frame.ByteSize() for frame in frames) < MAX_FRAME_BYTES + 4096 < MAX_MESSAGE_BYTES
    positions = [e.prompt_logprobs.first_position for frame in frames for e in frame.emissions]
    assert positions == list(range(700)) and not stream.overflow.is_set()


async def test_one_that_is_larger_than_a_frame_leaves_alone() -> None:
    stream = GatewayStream([])
    for position, num_positions in enumerate([1, 5000, 1]):
        stream.emit(scores(position, num_positions))
    frames = await frames_of(stream, 3)
    assert [len(frame.emissions) for frame in frames] == [1, 1, 1]
    assert frames[1].ByteSize() > MAX_FRAME_BYTES


async def test_small_emissions_of_a_step_are_one_frame() -> None:
    stream = GatewayStream([])
    for slot in range(2000):
        stream.emit(common_pb2.Emission(slot=slot, token_ids=[7]))
    (frame,) = await frames_of(stream, 2000)
    assert frame.models_changed


async def test_a_gateway_that_leaves_too_many_bytes_is_given_up() -> None:
    stream, large = GatewayStream([]), scores(0)
    num_before = MAX_OUTBOX_BYTES // large.ByteSize()
    assert num_before < gateway_stream.MAX_OUTBOX_EMISSIONS
    for _ in range(num_before):
        stream.emit(large)
    assert not stream.overflow.is_set()
    stream.emit(large)
    assert stream.overflow.is_set()
    await frames_of(stream, num_before + 1)
    stream.overflow.clear()
    stream.emit(large)
    assert not stream.overflow.is_set(), "what has left does not count"
