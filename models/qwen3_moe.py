"""Qwen3-MoE: Qwen3 where some layers, by default all, have experts instead of one MLP."""

from typing import ClassVar

from paceline.models.config import ExpertsConfig, ModelConfig
from paceline.models.fields import Fields
from paceline.models.layers import LayerBuilder
from paceline.models.mlp import MLP, Experts
from paceline.models.quantization import Part
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer, Wiring
from paceline.models.windows import read_switched_window, uniform_windows

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=24,
    num_heads=32,
    num_kv_heads=4,
    max_position=32768,
)


class Qwen3Moe(Transformer):
    """Qwen3MoeForCausalLM."""

    numerics_version: ClassVar[int] = 1
    wiring: ClassVar[Wiring] = Wiring(query_key_norm="head")

    def mlp(self, build: LayerBuilder, layer: int, name: str) -> MLP:
        config = self.config.experts
        if config is None or not config.layers[layer]:
            return super().mlp(build, layer, name)
        hidden, inner = self.config.hidden_size, config.intermediate_size
        parts = ("gate_proj", "up_proj", "down_proj")
        router = build.linear(
            [f"{name}.mlp.gate"], hidden, [config.num_experts], False, Part.ROUTER
        )
        experts = [
            self.gated_mlp(build, f"{name}.mlp.experts.{i}", inner, parts)
            for i in range(config.num_experts)
        ]
        return Experts(router, experts, config)

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        fields = reader.fields
        window = read_switched_window(fields, 4096)
        windows = uniform_windows(fields, reader.num_layers, window)
        bias = fields.flag("attention_bias", False)
        experts = _read_experts(fields, reader.num_layers)
        return reader.finish(reader.alike(windows), qkv_bias=bias, out_bias=bias, experts=experts)


def _read_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    other_name = fields.integer("num_local_experts", 128, minimum=0)  # transformers 5 writes it
    num_experts = fields.integer("num_experts", other_name, minimum=0)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", dense, "must be a list of layers")
    sizes = {
        "num_chosen": fields.integer("num_experts_per_tok", 8),
        "intermediate_size": fields.integer("moe_intermediate_size", 768),
        "normalized": fields.flag("norm_topk_prob", False),
    }
    if not num_experts:
        return None
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    return ExpertsConfig(num_experts=num_experts, layers=layers, **sizes)
