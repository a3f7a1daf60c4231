"""What a step of an engine takes, from measurements of a card.

    step = launch + token x n + pair x n x context + sequence x batch + cached x kv

n new prompt tokens (`context`: how many tokens each of them sees, on average), beside `batch`
sequences that decode with `kv` tokens of KV in all. `launch` is larger for a step with a prompt.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Times in seconds, of a model on a device."""

    prompt_launch_s: float  # a step with prompt tokens
    decode_launch_s: float  # a step without
    token_s: float  # a prompt token
    pair_s: float  # a prompt token and one that it sees
    sequence_s: float  # a sequence that decodes
    cached_s: float  # a token of KV that a decoding sequence reads
    max_step_tokens: int  # most prompt tokens of a step
    num_pages: int  # 16 tokens each
    max_running: int = 256
    pull_s: float = 0.0  # a token of KV that another worker pulls
    pull_launch_s: float = 0.0  # a hand-off

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        return self.decode_launch_s + self.sequence_s * batch + self.cached_s * kv_tokens

    def step_s(self, num_tokens: int, context: float, batch: int, kv_tokens: float) -> float:
        if not num_tokens:
            return self.decode_step_s(batch, kv_tokens)
        prompt = self.prompt_launch_s + num_tokens * (self.token_s + self.pair_s * context)
        return prompt + self.sequence_s * batch + self.cached_s * kv_tokens

    def prompt_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Of a prompt alone, in steps of `max_step_tokens`."""
        num_new = num_tokens - num_cached
        num_steps = -(-num_new // self.max_step_tokens)
        pairs = num_new * (num_cached + num_new / 2)
        return num_steps * self.prompt_launch_s + num_new * self.token_s + pairs * self.pair_s


# Llama-3.1-8B in bfloat16 on one NVIDIA H200, by vLLM 0.25.1: the tables of 2026-11 that
# docs/performance.md compares with. Least squares of relative errors; tests hold the deviations.
# Memory: 110 GB of KV at 128 KiB a token. Pulls: 386 GB/s between cards, behind the last chunk.
H200_LLAMA_8B = Profile(
    prompt_launch_s=14.1e-3,
    decode_launch_s=4.84e-3,
    token_s=2.09e-5,
    pair_s=8.5e-10,
    sequence_s=1.85e-5,
    cached_s=3.14e-8,
    max_step_tokens=2048,
    num_pages=52_000,
    pull_s=131_072 / 386e9,
    pull_launch_s=4e-3,
)

# Measured with it: (batch, prompt tokens) -> tokens/s of prefill, milliseconds of a decode step.
H200_TABLE = {
    (1, 1024): (28_435, 4.911),
    (8, 1024): (43_641, 5.323),
    (32, 1024): (43_759, 6.558),
    (64, 1024): (43_183, 7.802),
    (128, 1024): (42_972, 11.285),
    (256, 1024): (43_046, 19.313),
    (1, 8192): (38_577, 5.205),
    (32, 8192): (38_112, 13.581),
    (64, 8192): (38_085, 22.787),
}
