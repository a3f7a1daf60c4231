"""vLLM on the CPU in float32: the work of benchmarks.engine_cpu. Arguments: model folder.

With ATEN_CPU_CAPABILITY=avx2 its own code is that for AVX2, too.

Decode is the time of a long answer less that of its first token, over the tokens between; prompts
are new each time and prefix caching is off, as there.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")  # else it leaves one of two cores idle
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
    # vLLM asks the CPU, whatever torch is told, and has a build of its own code for AVX2.
    torch.cpu._is_avx512_supported = lambda: False

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

PROMPT_TOKENS, PREFILL_TOKENS, OUTPUT_TOKENS = 128, 1024, 49
REPEATS = 3


class Bench:
    def __init__(self, model: str) -> None:
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.chance = random.Random(3)

    def seconds(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [self.chance.randrange(300, 40000) for _ in range(prompt_tokens)]}
            for _ in range(batch)
        ]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_tokens)
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def decode_tok_s(self, batch: int) -> float:
        first = min(self.seconds(batch, PROMPT_TOKENS, 1) for _ in range(REPEATS))
        whole = min(self.seconds(batch, PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(REPEATS))
        return batch * (OUTPUT_TOKENS - 1) / (whole - first)


def main() -> None:
    bench = Bench(sys.argv[1])
    bench.seconds(1, 64, 8)
    figures = {f"decode_{batch}_tok_s": bench.decode_tok_s(batch) for batch in (1, 8, 32)}
    prefill_s = min(bench.seconds(1, PREFILL_TOKENS, 1) for _ in range(REPEATS))
    print(json.dumps({**figures, "prefill_tok_s": PREFILL_TOKENS / prefill_s}), flush=True)


if __name__ == "__main__":
    main()
