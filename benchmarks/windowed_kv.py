"""Pages that a long prompt holds on a model most of whose layers see a window.

A small random Gemma 3, five of six layers with a window, gets a prompt of eight windows: whole, and
split over two engines. `windowed_kv_fraction` is the most bytes of pages that it holds while a step
runs, over those of the same model without windows; `_end` the same at its last token. Its greedy
output must be that of transformers.
"""

import sys
import tempfile
from pathlib import Path

from transformers import Gemma3TextConfig, PreTrainedModel

from benchmarks.common import Figures, Options, publish, show
from paceline.engine.messages import RequestSpec, Submit
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.transformers_models import change_config, logits_of, save_random_model
from tests.unit.engine.benches import Bench, bench, prompt, request
from tests.unit.engine.hand_overs import hand_over

WINDOW = 512
NUM_LAYERS = 6
FULL = "full_attention"


def save_model(folder: Path) -> PreTrainedModel:
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        max_position_embeddings=16 * WINDOW,
        pad_token_id=None,
    )
    assert config.layer_types == ["sliding_attention"] * 5 + [FULL]
    return save_random_model(folder, config)


def engine_of(model: Model) -> Bench:
    num_pages = 10 * WINDOW // 16 * len(model.layout.groups)
    return bench(model, num_pages, max_batch_tokens=512)


def held_bytes(model: Model, spec: RequestSpec) -> tuple[list[int], list[int]]:
    """Bytes of pages while each step runs, and the output."""
    b = engine_of(model).handle(Submit(1, spec))
    num_pages = b.run_counting()
    b.assert_idle()
    return [num * model.layout.page.page_bytes for num in num_pages], b.tokens(1)


def split_output(model: Model, spec: RequestSpec) -> list[int]:
    source, reader = engine_of(model), engine_of(model)
    hand_over(source, reader, spec)
    source.assert_idle()
    reader.assert_idle()
    return source.tokens(1) + reader.tokens(1)


def num_differing(reference: PreTrainedModel, spec: RequestSpec, output: list[int]) -> int:
    """Tokens that are not transformers' choice behind those before them."""
    logits = logits_of(reference, [*spec.token_ids, *output])
    choices = logits[len(spec.token_ids) - 1 : -1].argmax(dim=-1).tolist()
    return sum(a != b for a, b in zip(output, choices, strict=True))


def measure(options: Options) -> Figures:
    max_tokens = 16 if options.quick else 128
    spec = request(prompt(8 * WINDOW), max_tokens=max_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = save_model(folder)
        model = load_model(folder).model
        show("whole")
        held, output = held_bytes(model, spec)
        show("split")
        split = split_output(model, spec)
        show("transformers")
        differing = num_differing(reference, spec, output)
        change_config(folder, layer_types=[FULL] * NUM_LAYERS)
        show("without windows")
        all_held, _ = held_bytes(load_model(folder).model, spec)
    differing += sum(a != b for a, b in zip(split, output, strict=True))
    return {
        "windowed_kv_fraction": max(held) / max(all_held),
        "windowed_kv_fraction_end": held[-1] / all_held[-1],
        "differing_tokens": differing,
        "prompt_tokens": len(spec.token_ids),
        "output_tokens": len(output),
    }


def main() -> int:
    return publish("windowed_kv", measure)


if __name__ == "__main__":
    sys.exit(main())
