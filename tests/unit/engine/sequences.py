"""A sequence as its group has admitted it."""

from typing import Any

from paceline.engine.admission import Admission
from paceline.engine.allowances import Allowances
from paceline.engine.config import EngineConfig
from paceline.engine.sequence import Sequence
from tests.unit.engine.benches import mock_model, request

VOCAB = 97


def sequence(prompt_ids: list[int], output_ids: list[int], **sampling: Any) -> Sequence:
    spec = request(
        [*prompt_ids, *output_ids], num_forced=len(output_ids), **({"max_tokens": 100} | sampling)
    )
    model = mock_model()
    allowances = Allowances(model.layout, 64, model.context_length, EngineConfig())
    group = Admission(model, allowances).admit(1, spec, 1, prefill_only=False)
    assert group.leader is not None
    return group.leader
