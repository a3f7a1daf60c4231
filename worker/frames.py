"""Engine events in the words of the worker protocol."""

from paceline.engine import messages
from paceline.rpc.convert import finish_to_proto
from paceline.v1 import common_pb2, kv_pb2, worker_pb2


def emission_to_proto(
    event: messages.Emission, router_slot: int, emitted_unix_us: int
) -> common_pb2.Emission:
    return common_pb2.Emission(
        slot=router_slot,
        choice=event.choice,
        position=event.position,
        token_ids=event.token_ids,
        logprobs=[_logprobs_to_proto(item) for item in event.logprobs],
        finish=finish_to_proto(event.finish),
        num_cached_tokens=event.num_cached_tokens,
        emitted_unix_us=emitted_unix_us,
    )


def scores_to_proto(event: messages.PromptScored, router_slot: int) -> common_pb2.Emission:
    positions = [_logprobs_to_proto(item) for item in event.scores]
    part = common_pb2.PromptLogprobs(first_position=event.first_position, positions=positions)
    return common_pb2.Emission(slot=router_slot, prompt_logprobs=part)


def embedding_to_proto(event: messages.Embedding, router_slot: int) -> common_pb2.Emission:
    return common_pb2.Emission(
        slot=router_slot,
        finish=common_pb2.FINISH_REASON_STOP,
        num_cached_tokens=event.num_cached_tokens,
        embedding=event.vector,
    )


def _logprobs_to_proto(item: messages.PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=item.token_id, logprob=item.logprob),
        top=[common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in item.top],
        rank=item.rank,
    )


def load_to_proto(load: messages.Load, step: int, rounds: int, draining: bool) -> worker_pb2.Load:
    return worker_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_pages=max(load.num_free_pages, 0),
        num_pages=load.num_pages,
        step=step,
        rounds=rounds,
        draining=draining,
        prompt_token_us=1e6 * load.token_s,
    )


def record_to_proto(
    event: messages.HandoffReady, request: messages.RequestSpec
) -> kv_pb2.HandoffRecord:
    return kv_pb2.HandoffRecord(
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=event.num_tokens,
        first_tokens=[
            kv_pb2.FirstToken(
                choice=first.choice, token_id=first.token_id, finish=finish_to_proto(first.finish)
            )
            for first in event.first_tokens
        ],
    )
