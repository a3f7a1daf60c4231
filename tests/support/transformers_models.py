"""Small random transformers models, saved as folders, to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def save_random_model(folder: Path, config: PreTrainedConfig, **save: Any) -> PreTrainedModel:
    """Weights large enough that every part decides: logits get a standard deviation above 1."""
    generator = torch.Generator().manual_seed(17)
    made: Any = AutoModelForCausalLM  # ships no types for it
    model: PreTrainedModel = made.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * 1.5 / config.hidden_size**0.5)
    model.save_pretrained(folder, **save)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json; `a__b` sets field b of object a; ... removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = config
        for part in outer:
            place = place[part]
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    path.write_text(json.dumps(config))


def logits_of(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[T, vocab], all of the sequence in one forward."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0]
