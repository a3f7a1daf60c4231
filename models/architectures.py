"""Architecture name of config.json → the class that wires it. Needs no torch."""

from paceline.core.errors import ConfigError

MOCK = "PacelineMockForCausalLM"  # of our own tests: it has no weights

MODELS = {
    "GPT2LMHeadModel": "paceline.models.gpt2:GPT2",
    "Gemma2ForCausalLM": "paceline.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "paceline.models.gemma3:Gemma3",
    "LlamaForCausalLM": "paceline.models.llama:Llama",
    "MistralForCausalLM": "paceline.models.mistral:Mistral",
    "MixtralForCausalLM": "paceline.models.mixtral:Mixtral",
    "Olmo2ForCausalLM": "paceline.models.olmo2:Olmo2",
    MOCK: "paceline.models.mock:MockModel",
    "Phi3ForCausalLM": "paceline.models.phi3:Phi3",
    "Qwen2ForCausalLM": "paceline.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "paceline.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "paceline.models.qwen3_moe:Qwen3Moe",
    "SmolLM3ForCausalLM": "paceline.models.smollm3:SmolLM3",
}


def architecture_of(names: object) -> str:
    """The one that `architectures` of a config.json names. Raises ConfigError if it is not ours."""
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in MODELS:
        known = ", ".join(sorted(MODELS.keys() - {MOCK}))
        raise ConfigError("architectures", name, f"unknown architecture; known: {known}")
    return name
