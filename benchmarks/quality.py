"""What quantised weights cost in quality: perplexity of the demo model on a public text.

The text is Python's own language reference, as `pydoc` ships it: the topics of TOPICS one after the
other, in pieces of 1024 tokens, each scored from its first token on (`prompt_logprobs` of the
engine). `…_perplexity_ratio` is the perplexity with weights rounded on load over that with float32.
The demo model's float weights come from a 4-bit file: rounding them to 4 bits again costs less than
it would in a model that was trained in floats.
"""

import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import PromptScored, RequestSpec, Submit
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.loader import load_model

TOPICS = ("objects", "types", "execmodel", "naming")
PIECE_TOKENS = 1024
NUM_PIECES = 8
QUICK_PIECES = 3
POOL_PAGES = 256


def pieces(model: Path, num_pieces: int) -> list[list[int]]:
    text = "\n".join(topics[name] for name in TOPICS)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    wanted = num_pieces * PIECE_TOKENS
    if len(tokens) < wanted:
        raise SystemExit(f"quality: the topics of this Python have {len(tokens)} tokens only")
    return [tokens[i : i + PIECE_TOKENS] for i in range(0, wanted, PIECE_TOKENS)]


def perplexity(model: Path, quantization: str, texts: list[list[int]]) -> float:
    loaded = load_model(model, quantization=quantization).model
    pools = allocate_pools(loaded.layout, POOL_PAGES, "cpu")
    engine = Engine(loaded, EngineConfig(), pools, pool_memory(pools[0]))
    sampling = SamplingParams(max_tokens=1, temperature=0, num_prompt_logprobs=0)
    total, count = 0.0, 0
    for slot, tokens in enumerate(texts):
        spec = RequestSpec(f"piece-{slot}", tokens, len(tokens), bytes(32), sampling, (0,))
        engine.handle(Submit(slot, spec))
        while (output := engine.step()) is not None:
            for event in output.events:
                if isinstance(event, PromptScored):
                    total -= sum(score.logprob for score in event.scores)
                    count += len(event.scores)
    assert count == sum(len(tokens) - 1 for tokens in texts)
    return math.exp(total / count)


def measure(options: Options) -> dict[str, float]:
    model = demo_model()
    texts = pieces(model, QUICK_PIECES if options.quick else NUM_PIECES)
    found: dict[str, float] = {}
    with torch.inference_mode():
        for name, quantization in (("float32", "auto"), ("int8", "int8"), ("int4", "int4")):
            found[name] = perplexity(model, quantization, texts)
            show(f"{name}: perplexity {found[name]:.4f}")
    return {
        "num_tokens": sum(map(len, texts)),
        **{f"{name}_perplexity": value for name, value in found.items()},
        "int8_perplexity_ratio": found["int8"] / found["float32"],
        "int4_perplexity_ratio": found["int4"] / found["float32"],
    }


def main() -> int:
    return publish("quality", measure)


if __name__ == "__main__":
    sys.exit(main())
