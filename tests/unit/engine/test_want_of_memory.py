"""A step that wants more memory than there is makes the next ones smaller; nothing is lost."""

import pytest
import torch
from structlog.testing import capture_logs

from paceline.engine.messages import Submit
from paceline.models.base import ForwardBatch
from tests.unit.engine.benches import alone, bench, prompt, request
from tests.unit.engine.recorder import Recorder


class SmallDevice(Recorder):
    """Holds so many tokens of a step."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.most_tokens = most_tokens

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if len(batch.token_ids) > self.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch, pools)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [64, 14])  # the fewer: some wait for pages
def test_prompts_are_computed_in_smaller_steps(overlap: bool, num_pages: int) -> None:
    model = SmallDevice(most_tokens=20)
    b = bench(model, num_pages=num_pages, max_batch_tokens=64, max_running=4, overlap=overlap)
    specs = {i: request(prompt(30 + 20 * i, i), max_tokens=20) for i in range(4)}
    with capture_logs() as logs:
        b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run().assert_idle()
    for slot, spec in specs.items():
        assert b.tokens(slot) == alone(spec)[0]
    assert b.engine.clock.launched == len(model.batches), "pages wait for no step that never was"
    assert 4 < b.engine.scheduler.max_batch_tokens <= 20
    limits = [line["max_batch_tokens"] for line in logs if "more memory" in line["event"]]
    assert limits[-1] == b.engine.scheduler.max_batch_tokens and limits == sorted(limits)[::-1]


def test_streams_alone_cannot_be_made_smaller() -> None:
    model = SmallDevice(most_tokens=64)
    b = bench(model, max_batch_tokens=64, max_running=4)
    b.handle(Submit(1, request(prompt(30), max_tokens=20)))
    b.step()
    model.most_tokens = 0
    with pytest.raises(torch.OutOfMemoryError):
        b.run()
