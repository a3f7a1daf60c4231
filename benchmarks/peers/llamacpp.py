"""llama.cpp through llama-cpp-python: one stream and a prompt. Arguments: GGUF file, threads."""

import json
import random
import sys
import time

from llama_cpp import Llama  # type: ignore[import-not-found]

PROMPT_TOKENS, PREFILL_TOKENS, OUTPUT_TOKENS = 128, 1024, 49
REPEATS = 3


class Bench:
    def __init__(self, path: str, num_threads: int) -> None:
        self.llama = Llama(
            path,
            n_ctx=2048,
            n_batch=1024,
            n_ubatch=1024,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            verbose=False,
        )
        self.chance = random.Random(3)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.chance.randrange(300, 40000) for _ in range(num_tokens)]

    def prefill_s(self) -> float:
        self.llama.reset()
        prompt = self.prompt(PREFILL_TOKENS)
        began = time.perf_counter()
        self.llama.eval(prompt)
        return time.perf_counter() - began

    def decode_s(self) -> float:
        """One token after a prompt."""
        self.llama.reset()
        self.llama.eval(self.prompt(PROMPT_TOKENS))
        began = time.perf_counter()
        for token in self.prompt(OUTPUT_TOKENS):
            self.llama.eval([token])
        return (time.perf_counter() - began) / OUTPUT_TOKENS


def main() -> None:
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    bench.decode_s()
    decode_s = min(bench.decode_s() for _ in range(REPEATS))
    prefill_s = min(bench.prefill_s() for _ in range(REPEATS))
    figures = {"decode_1_tok_s": 1 / decode_s, "prefill_tok_s": PREFILL_TOKENS / prefill_s}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
