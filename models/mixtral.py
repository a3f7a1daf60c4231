"""Mixtral: Mistral whose MLPs are experts, the weights of those chosen sum to 1."""

from typing import ClassVar

from paceline.models.config import ExpertsConfig, ModelConfig
from paceline.models.layers import LayerBuilder
from paceline.models.mlp import MLP, Experts
from paceline.models.quantization import Part
from paceline.models.reading import ConfigReader, Defaults
from paceline.models.registry import ModelSource
from paceline.models.transformer import Transformer
from paceline.models.windows import read_window, uniform_windows

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_position=4096 * 32,
    norm_epsilon=1e-5,
    theta=1_000_000.0,
)


class Mixtral(Transformer):
    """MixtralForCausalLM."""

    numerics_version: ClassVar[int] = 1

    def mlp(self, build: LayerBuilder, layer: int, name: str) -> MLP:
        config = self.config.experts
        assert config is not None
        name = f"{name}.block_sparse_moe"
        router = build.linear(
            [f"{name}.gate"], self.config.hidden_size, [config.num_experts], False, Part.ROUTER
        )
        experts = [
            self.gated_mlp(
                build, f"{name}.experts.{i}", config.intermediate_size, ("w1", "w3", "w2")
            )
            for i in range(config.num_experts)
        ]
        return Experts(router, experts, config)

    @staticmethod
    def read_config(source: ModelSource) -> ModelConfig:
        reader = ConfigReader(source, DEFAULTS)
        fields = reader.fields
        windows = uniform_windows(fields, reader.num_layers, read_window(fields))
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts", 8),
            num_chosen=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size", DEFAULTS.intermediate_size),
            normalized=True,
            layers=(True,) * reader.num_layers,
        )
        return reader.finish(reader.alike(windows), experts=experts)
