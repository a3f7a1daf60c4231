"""What this machine allows: read bandwidth, matrix rate, and the least work of a model's step.

Each rate is the better of torch's and ours, of one operation alone in a loop: neither is a floor
where the other beats it.

Only work that must be done counts: each weight that a step needs is read once (of the embedding
only what is also the output matrix), the KV of every sequence once; two operations a weight and
token, four a KV element and query head. A step takes at least the longer of reading and computing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import seconds
from paceline.kernels.product import hold

READ_ELEMENTS = 1 << 28  # 1 GiB of float32, far over the caches
MATRIX_SIZE = 2048  # also the depth of the weight that one row reads
REPEATS = 7


def best_seconds(call: Callable[[], object]) -> float:
    call()
    return min(seconds(call) for _ in range(REPEATS))


@dataclass(frozen=True, slots=True)
class Machine:
    read_bytes_s: float
    flop_s: float  # float32 matrix product, all threads

    @staticmethod
    def measure() -> "Machine":
        values = torch.ones(MATRIX_SIZE, READ_ELEMENTS // MATRIX_SIZE)
        read_s = best_seconds(values.sum)
        packed, row = hold(values), torch.ones(1, MATRIX_SIZE)
        read_s = min(read_s, best_seconds(lambda: packed.multiply(row, None)))
        a, b = torch.randn(MATRIX_SIZE, MATRIX_SIZE), torch.randn(MATRIX_SIZE, MATRIX_SIZE)
        product_s = best_seconds(lambda: a @ b)
        packed = hold(b)
        product_s = min(product_s, best_seconds(lambda: packed.multiply(a, None)))
        return Machine(values.nbytes / read_s, 2 * MATRIX_SIZE**3 / product_s)


@dataclass(frozen=True, slots=True)
class LlamaWork:
    """Sizes of a Llama-like model with tied embeddings, and the floors that follow from them."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    element_bytes: int = 4

    @staticmethod
    def of(model: Path) -> "LlamaWork":
        config = json.loads((model / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return LlamaWork(
            num_layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """One copy; norms are left out, they are a ten-thousandth."""
        return (self.layer_weights + self.output_weights) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    def decode_floor_s(self, machine: Machine, batch: int, context: float) -> float:
        """One step of `batch` sequences with `context` tokens each."""
        num_bytes = self.weight_bytes + batch * context * self.kv_bytes_per_token
        weights = self.layer_weights + self.output_weights
        num_operations = batch * (2 * weights + self._attention(context))
        return max(num_bytes / machine.read_bytes_s, num_operations / machine.flop_s)

    def prefill_floor_s(self, machine: Machine, num_tokens: int) -> float:
        """A whole prompt; the output matrix meets its last token only."""
        per_token = 2 * self.layer_weights + self._attention((num_tokens + 1) / 2)
        num_operations = num_tokens * per_token + 2 * self.output_weights
        return max(self.weight_bytes / machine.read_bytes_s, num_operations / machine.flop_s)

    def _attention(self, context: float) -> float:
        """Operations of one query token over `context` tokens, all layers."""
        return 4 * context * self.num_layers * self.num_heads * self.head_dim
