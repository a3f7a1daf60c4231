"""Reads what the configs of most families have in common, with each family's defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.models.config import AttentionConfig, ModelConfig, check_unread, served_context
from paceline.models.layers import ACTIVATIONS
from paceline.models.registry import ModelSource
from paceline.models.rope import Lengths, RopeConfig, longest_context, read_rope, rope_fields


@dataclass(frozen=True, slots=True)
class Defaults:
    """What transformers takes for the fields that a config.json leaves out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    activation_field: str = "hidden_act"
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    tied_embeddings: bool = False
    theta: float = 10000.0


class ConfigReader:
    """Sizes at once; then a family reads its own fields, and `finish` refuses what is left.

    All raise ConfigError naming a field that is wrong.
    """

    def __init__(self, source: ModelSource, defaults: Defaults) -> None:
        self.fields = fields = source.fields
        self.defaults = defaults
        self.num_layers: int = fields.integer("num_hidden_layers", defaults.num_layers)
        self.hidden_size: int = fields.integer("hidden_size", defaults.hidden_size)
        self.num_heads: int = fields.integer("num_attention_heads", defaults.num_heads)
        own_dim = defaults.head_dim or self.hidden_size // self.num_heads
        self.head_dim: int = fields.integer("head_dim", own_dim)
        self.max_position: int = fields.integer("max_position_embeddings", defaults.max_position)
        longest = longest_context(fields, self.max_position)
        self.context_length = served_context(self.max_position, longest, source.max_context_length)

    def rope(self, partial: bool = False, original: int | None = None) -> RopeConfig:
        """Of a family with one for all layers. `partial`: it may rotate a part of each head.
        `original`: default of the field original_max_position_embeddings, which then has one."""
        fields, parameters = self.fields, rope_fields(self.fields)
        name = "partial_rotary_factor"
        share = parameters.number(name, fields.number(name, 1.0))
        if not partial and share != 1:
            raise fields.error(name, share, "is not supported for this architecture")
        original = fields.integer("original_max_position_embeddings", original)
        lengths = Lengths(self.max_position, self.context_length, original)
        theta = fields.number("rope_theta", self.defaults.theta)
        return read_rope(parameters, int(self.head_dim * share), theta, lengths)

    def alike(
        self, windows: Sequence[int] | None = None, rope: RopeConfig | None = None
    ) -> tuple[AttentionConfig, ...]:
        """Layers that differ at most in their windows, with `rope` or that of most families."""
        scale, rope = self.head_dim**-0.5, rope or self.rope()
        windows = (0,) * self.num_layers if windows is None else windows
        return tuple(AttentionConfig(scale, rope, window) for window in windows)

    def finish(self, attentions: tuple[AttentionConfig, ...], **others: Any) -> ModelConfig:
        """`others`: further arguments of ModelConfig."""
        fields, defaults = self.fields, self.defaults
        config = ModelConfig(
            vocab_size=fields.integer("vocab_size", defaults.vocab_size),
            max_position=self.max_position,
            context_length=self.context_length,
            hidden_size=self.hidden_size,
            intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
            num_heads=self.num_heads,
            num_kv_heads=self._num_kv_heads(),
            head_dim=self.head_dim,
            activation=fields.choice(defaults.activation_field, ACTIVATIONS, defaults.activation),
            norm_epsilon=fields.number("rms_norm_eps", defaults.norm_epsilon),
            tied_embeddings=fields.flag("tie_word_embeddings", defaults.tied_embeddings),
            attentions=attentions,
            **others,
        )
        check_unread(fields)
        return config

    def _num_kv_heads(self) -> int:
        if self.fields.is_null("num_key_value_heads"):
            return self.num_heads
        default = self.defaults.num_kv_heads or self.num_heads
        num: int = self.fields.integer("num_key_value_heads", default)
        return num
