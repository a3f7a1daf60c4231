"""What a config.json says, read once into a frozen value; what cannot be honoured is refused."""

from dataclasses import dataclass, replace
from typing import Any

import structlog

from paceline.core.errors import ConfigError
from paceline.models.fields import Fields
from paceline.models.rope import RopeConfig

log = structlog.get_logger()

# Fields that change the computation where they are set, with the values under which they do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_bias": (False,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "quantization_config": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

# Fields that never reach a forward pass of a trained model.
_HARMLESS_NAMES = """
    _attn_implementation _name_or_path _sliding_window_pattern architectures attention_dropout
    attn_pdrop auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype embd_pdrop
    eos_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder
    is_llama_config label2id max_window_layers model_type n_ctx name_or_path output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type resid_pdrop
    return_dict router_aux_loss_coef router_jitter_noise summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params torch_dtype
    transformers.js_config transformers_version unk_token_id use_cache
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Of one layer."""

    scale: float  # of the scores
    rope: RopeConfig | None = None
    window: int = 0  # the last tokens that a token sees, itself included; 0: all
    softcap: float = 0.0  # of the scores; 0: none


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    num_experts: int
    num_chosen: int  # by each token
    intermediate_size: int
    normalized: bool  # weights of the chosen ones are made to sum to 1
    layers: tuple[bool, ...]  # which have experts

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            reason = f"must not exceed the number of experts, {self.num_experts}"
            raise ConfigError("num_experts_per_tok", self.num_chosen, reason)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, in terms common to the families."""

    vocab_size: int
    max_position: int  # max_position_embeddings
    context_length: int  # that is served
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_epsilon: float
    tied_embeddings: bool
    attentions: tuple[AttentionConfig, ...]  # of every layer
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    logits_softcap: float = 0.0  # 0: none
    experts: ExpertsConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Each that a layer has, once."""
        return tuple(dict.fromkeys(a.rope for a in self.attentions if a.rope is not None))

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            reason = f"must divide the number of attention heads, {self.num_heads}"
            raise ConfigError("num_key_value_heads", self.num_kv_heads, reason)

    @property
    def semantics(self) -> object:
        """All that decides KV bytes. Not the context's length: rope has resolved it."""
        return replace(self, context_length=0)


def served_context(default: int, longest: int, wanted: int | None) -> int:
    """The context to serve: `wanted`, where somebody set it."""
    if wanted is not None and not 1 <= wanted <= longest:
        raise ConfigError("max_context_length", wanted, f"must lie between 1 and {longest}")
    return wanted or default


def check_unread(fields: Fields) -> None:
    """Refuses what would change the result; says what else has no effect. Called last."""
    for name, value in fields.unread().items():
        if value is None or name in _HARMLESS:
            continue
        if name == "layer_types":
            if set(value) != {"full_attention"}:
                raise fields.error(name, value, "only full_attention is supported")
        elif name in _UNSUPPORTED:
            if value not in _UNSUPPORTED[name]:
                raise fields.error(name, value, "is not supported for this architecture")
        else:
            log.warning("unknown field of config.json has no effect", field=name, value=value)
