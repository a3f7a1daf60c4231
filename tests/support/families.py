"""Small configs of each family, with the variants and changes that its tests go through.

Sequences of the tests have 80 tokens: longer than the windows and the original contexts here.
"""

from dataclasses import dataclass, field
from typing import Any

Changes = dict[str, Any]  # of config.json; a__b is field b of object a
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = 32

SMALL: Changes = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
# Each is refused, or changes the logits, of every family.
COMMON: list[Changes] = [
    {"rms_norm_eps": 0.05},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 4},
    {"intermediate_size": 64},
    {"hidden_size": 64},
    {"vocab_size": 100},
    {"tie_word_embeddings": True},
]


def rope(kind: str = "default", theta: float = 500.0, **parameters: Any) -> Changes:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


USUAL: list[Changes] = [{"rope_parameters__rope_theta": 700.0}, {"hidden_act": "gelu"}]


@dataclass(frozen=True, slots=True)
class Family:
    config_class: str
    default: Changes  # over SMALL
    variants: dict[str, Changes] = field(default_factory=dict)  # over the default
    mutations: list[tuple[str, Changes]] = field(default_factory=list)  # of a variant
    refused: list[tuple[Changes, str]] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        return self.config_class.replace("TextConfig", "Config").replace("Config", "ForCausalLM")

    def config(self, variant: str) -> Changes:
        return SMALL | self.default | ({} if variant == "default" else self.variants[variant])


def mutations(*changes: Changes, variant: str = "default") -> list[tuple[str, Changes]]:
    return [(variant, change) for change in changes]


WINDOW_REFUSED: list[tuple[Changes, str]] = [
    ({"sliding_window": 0}, "sliding_window=0: must be an integer of at least 1"),
    ({"sliding_window": "wide"}, "sliding_window='wide': must be an integer"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types=['linear_attention', 'linear_"),
    ({"layer_types": [SLIDING] * 2}, "for each of 3 layers"),
]
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
QWEN_MUTATIONS = mutations(
    {"sliding_window": 24},
    {"use_sliding_window": False, "layer_types": ...},
    {"max_window_layers": 2, "layer_types": ...},
    {"layer_types": [FULL, FULL, SLIDING]},
    variant="window",
)
GEMMA_NAMES: list[Changes] = [{"hidden_activation": "silu"}, {"query_pre_attn_scalar": 12}]
GEMMA: Changes = {"tie_word_embeddings": True, "sliding_window": 20, "query_pre_attn_scalar": 6}
GEMMA_COMMON = [{"tie_word_embeddings": False}, *COMMON[:-1]]

FAMILIES: dict[str, Family] = {
    "mistral": Family(
        "MistralConfig",
        {"sliding_window": 20} | rope(),
        {
            "no window": {"sliding_window": None},
            "window of one": {"sliding_window": 1},
            "yarn, beyond the original": rope(**YARN),
        },
        mutations(*COMMON, *USUAL, {"sliding_window": 21}, {"sliding_window": None}),
        [
            *WINDOW_REFUSED,
            ({"layer_types": [FULL] * 3}, "must all be sliding_attention"),
            ({"attention_bias": True}, "attention_bias=True: is not supported"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: is not supported"),
        ],
    ),
    "qwen2": Family(
        "Qwen2Config",
        rope(),
        {"window": QWEN_WINDOW, "types": QWEN_WINDOW | {"layer_types": [SLIDING, FULL, SLIDING]}},
        mutations(*COMMON, *USUAL) + QWEN_MUTATIONS,
        [*WINDOW_REFUSED, ({"layer_types": [SLIDING] * 3}, "sliding_window=None: a window is")],
    ),
    "qwen3": Family(
        "Qwen3Config",
        rope(),
        {
            "window": QWEN_WINDOW,
            "biases": {"attention_bias": True},
            "own head_dim": {"head_dim": 12},
            "yarn, beyond the original": rope(**YARN),
        },
        mutations(*COMMON, *USUAL, {"attention_bias": True}) + QWEN_MUTATIONS,
        WINDOW_REFUSED,
    ),
    "phi3": Family(
        "Phi3Config",
        {"original_max_position_embeddings": ORIGINAL} | rope(),
        {
            "window": {"sliding_window": 20},
            "partial": rope(partial_rotary_factor=0.75),
            "longrope": rope(
                "longrope",
                short_factor=[1.0 + 0.1 * i for i in range(4)],
                long_factor=[2.0 + 0.9 * i for i in range(4)],
            ),
            "longrope, partial": rope(
                "longrope",
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.1],
                long_factor=[2.0, 3.5],
            ),
        },
        [
            *mutations(*COMMON, *USUAL, {"sliding_window": 20}),
            *mutations({"sliding_window": 21}, variant="window"),
            *mutations({"rope_parameters__partial_rotary_factor": 0.25}, variant="partial"),
            *mutations(
                {"rope_parameters__long_factor": [2.0, 3.6]},
                {"rope_parameters__partial_rotary_factor": 1.0},
                {"original_max_position_embeddings": 100},
                {"original_max_position_embeddings": 64},
                {"original_max_position_embeddings": ...},
                {"max_position_embeddings": 200},
                variant="longrope, partial",
            ),
        ],
        [
            *WINDOW_REFUSED,
            ({"lm_head_bias": True}, "lm_head_bias=True: is not supported"),
            ({"rope_parameters__partial_rotary_factor": 0.125}, "head_dim=1: must be even"),
        ],
    ),
    "gemma2": Family(
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0} | rope(),
        {
            "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "usual caps": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            "other layers, biases": {
                "layer_types": [FULL, SLIDING, SLIDING],
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
        },
        mutations(
            *GEMMA_COMMON,
            *GEMMA_NAMES,
            {"rope_parameters__rope_theta": 700.0},
            {"attn_logit_softcapping": 5.0},
            {"attn_logit_softcapping": None},
            {"attn_logit_softcapping": ...},
            {"final_logit_softcapping": 9.0},
            {"final_logit_softcapping": None},
            {"final_logit_softcapping": ...},
            {"sliding_window": 21},
            {"layer_types": [FULL, SLIDING, FULL]},
            {"attention_bias": True},
        ),
        [
            *WINDOW_REFUSED,
            ({"sliding_window": None}, "sliding_window=None: a window is needed by layers"),
            ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0: must be positive"),
            ({"final_logit_softcapping": "big"}, "final_logit_softcapping='big': must be a num"),
            ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0: must be positive"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ],
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        GEMMA
        | {
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
                SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        {
            "capped logits, untied": {"final_logit_softcapping": 8.0, "tie_word_embeddings": False},
            "biases": {"attention_bias": True, "layer_types": [FULL, SLIDING, FULL]},
        },
        [
            *mutations(
                *GEMMA_COMMON,
                *GEMMA_NAMES,
                {"rope_parameters__full_attention__rope_theta": 700.0},
                {"rope_parameters__full_attention__factor": 5.0},
                {"rope_parameters__sliding_attention__rope_theta": 700.0},
                {"sliding_window": 21},
                {"layer_types": [FULL, SLIDING, FULL]},
                {"final_logit_softcapping": 9.0},
                {"attention_bias": True},
            ),
            *mutations({"final_logit_softcapping": None}, variant="capped logits, untied"),
        ],
        [
            *WINDOW_REFUSED,
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: is not supported"),
            ({"rope_parameters": {"rope_theta": 5.0}}, "must have parameters for full_attention"),
            (
                {"rope_parameters__full_attention__beta": 1},
                "rope_parameters.full_attention.beta=1: is not a field of rope_type linear",
            ),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ],
    ),
    "smollm3": Family(
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True} | rope(),
        {
            "window": {"use_sliding_window": True, "sliding_window": 20},
            "by interval, biases": {
                "no_rope_layers": None,
                "no_rope_layer_interval": 3,
                "attention_bias": True,
                "mlp_bias": True,
            },
        },
        [
            *mutations(
                {"tie_word_embeddings": False},
                *COMMON[:-1],
                *USUAL,
                {"no_rope_layers": [1, 1, 1]},
                {"no_rope_layers": ...},
                {"attention_bias": True},
                {"mlp_bias": True},
            ),
            *mutations(
                {"no_rope_layers": ..., "no_rope_layer_interval": 2},
                {"no_rope_layers": ..., "no_rope_layer_interval": ...},
                variant="by interval, biases",
            ),
            *mutations(
                {"sliding_window": 21},
                {"use_sliding_window": False},
                {"layer_types": [SLIDING] * 3},
                variant="window",
            ),
        ],
        [
            *WINDOW_REFUSED,
            ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]: must hold 0 or 1 for each of 3"),
            ({"no_rope_layers": [1, 0, 2]}, "must hold 0 or 1"),
        ],
    ),
    "olmo2": Family(
        "Olmo2Config",
        rope(),
        {
            "biases": {"attention_bias": True},
            "no groups": {"num_key_value_heads": 4},
            "yarn, beyond the original": rope(**YARN),
        },
        mutations(*COMMON, *USUAL, {"attention_bias": True}),
        [
            ({"clip_qkv": 8.0}, "clip_qkv=8.0: is not supported"),
            ({"sliding_window": 20}, "sliding_window=20: is not supported"),
        ],
    ),
    "mixtral": Family(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2} | rope(),
        {
            "window": {"sliding_window": 20},
            "one of three": {"num_local_experts": 3, "num_experts_per_tok": 1},
        },
        mutations(
            *COMMON,
            *USUAL,
            {"sliding_window": 20},
            {"num_experts_per_tok": 1},
            {"num_local_experts": 3},
            {"num_local_experts": 5},
        ),
        [
            *WINDOW_REFUSED,
            ({"num_experts_per_tok": 5}, "num_experts_per_tok=5: must not exceed the number of"),
        ],
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,  # no token is near another choice of experts
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        }
        | rope(),
        {
            "every second, plain shares": {
                "decoder_sparse_step": 2,
                "mlp_only_layers": [],
                "norm_topk_prob": False,
            },
            "dense": {"num_experts": 0},
            "window, biases": {
                "use_sliding_window": True,
                "sliding_window": 20,
                "attention_bias": True,
            },
        },
        mutations(
            *COMMON,
            *USUAL,
            {"num_local_experts": 4},
            {"num_experts": 6},
            {"num_experts_per_tok": 3},
            {"moe_intermediate_size": 20},
            {"mlp_only_layers": []},
            {"decoder_sparse_step": 2},
            {"norm_topk_prob": False},
            {"use_sliding_window": True, "sliding_window": 20},
            {"attention_bias": True},
        ),
        [
            ({"mlp_only_layers": 1}, "mlp_only_layers=1: must be a list of layers"),
            ({"num_experts_per_tok": 6}, "num_experts_per_tok=6: must not exceed"),
            ({"layer_types": [SLIDING] * 3}, "must all be full_attention"),
        ],
    ),
}
