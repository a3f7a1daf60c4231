"""Every kind of step runs before the first request, and leaves nothing behind."""

from pathlib import Path

import pytest

from paceline.engine.messages import Submit
from paceline.engine.warm_up import warm_up
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.tiny_families import TINY_WRITERS
from tests.unit.engine.benches import alone, bench, mock_model, prompt, request


def models(folder: Path) -> list[Model]:
    tiny = TINY_WRITERS["gemma3"](folder)  # has several page groups
    return [load_model(tiny).model, mock_model(num_hidden_layers=2, layer_windows=[0, 20])]


@pytest.mark.parametrize("which", [0, 1])
def test_later_tokens_do_not_depend_on_it(tmp_path: Path, which: int) -> None:
    model = models(tmp_path)[which]
    b = bench(model, 80, max_running=3)
    told: list[tuple[int, int]] = []
    warm_up(b.engine.runner, 0, 40, 70, lambda done, total: told.append((done, total)))
    assert told == [(i + 1, 6) for i in range(6)]  # chunks of 16, 40; 1, 2, 3 decodes; the rest
    spec = request([token % 60 for token in prompt(50)], max_tokens=6, temperature=1.0)
    b.handle(Submit(1, spec)).run().assert_idle()
    assert {0: b.tokens(1)} == alone(spec, model)
