"""Rotary frequencies of every scaling that transformers knows for these families.

`default`, `linear`, `yarn` and `llama3` give one set of frequencies. `dynamic` and `longrope` let
transformers change them with the length of the sequence, also for a sequence that grows: keys
cached before then mix with keys of other frequencies, and KV no longer follows from its prefix.
Paceline fixes them when the model is loaded: **to those that transformers uses for a sequence as
long as the served context**, for every sequence. So chunks, cached prefixes and pulled pages
always fit together. By default the served context is max_position_embeddings; `linear` and
`dynamic` can be served `factor` times as far, which is what raises the base of `dynamic`. What was
fixed is a part of the content digest.

Formulas: transformers `modeling_rope_utils`; papers: YaRN arXiv:2309.00071, LongRoPE
arXiv:2402.13753, dynamic NTK by bloc97 and emozilla.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.models.fields import Fields


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Resolved: nothing in it depends on a sequence any more."""

    kind: str
    dim: int  # how many of a head's dimensions are rotated, from the first on
    theta: float
    factor: float = 1.0
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    original_length: int = 0  # context of the pretraining
    low: float = 0.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn: whole numbers as bounds of the ramp
    divisors: tuple[float, ...] = ()  # longrope: one a frequency
    fixed_length: int = 0  # dynamic: the sequence length that decides


@dataclass(frozen=True, slots=True)
class Lengths:
    max_position: int  # max_position_embeddings
    served: int
    original: int | None = None  # of the model's own fields, which come first


def rope_fields(fields: Fields) -> Fields:
    """The object with the parameters, under its new name or its old one."""
    value = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    fields.get("rope_parameters")
    if not isinstance(value, dict):
        raise fields.error("rope_parameters", value, "must be an object")
    return Fields(value, "rope_parameters.")


def longest_context(fields: Fields, max_position: int) -> int:
    """How far the model may be served at most."""
    rope = rope_fields(fields)
    stretches = _kind(rope) in ("linear", "dynamic")
    return int(max_position * max(1.0, rope.number("factor"))) if stretches else max_position


def read_rope(rope: Fields, dim: int, theta: float, lengths: Lengths) -> RopeConfig:
    """`theta` is the default. Raises ConfigError naming a field that is missing, wrong or unknown.

    `partial_rotary_factor` is the caller's: `dim` follows from it."""
    if dim % 2 or not dim:
        raise rope.error("head_dim", dim, "must be even for rotary embedding")
    kind = _kind(rope)
    theta = rope.number("rope_theta", theta)
    rope.get("original_max_position_embeddings")  # kinds that do not use it carry it, too
    config = RopeConfig(kind, dim, theta, **_KINDS[kind](rope, lengths))
    if config.divisors and len(config.divisors) != dim // 2:
        reason = f"needs {dim // 2} numbers"
        raise rope.error("long_factor, short_factor", len(config.divisors), reason)
    for name, value in rope.unread().items():
        if value is not None and name != "finetuned":
            raise rope.error(name, value, f"is not a field of rope_type {kind}")
    return config


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[head_dim / 2] float32, on the CPU. The steps are in float32 as in transformers."""
    dim, theta = rope.dim, rope.theta
    if rope.kind == "dynamic":
        stretch = rope.factor * rope.fixed_length / rope.original_length - (rope.factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _kind(rope: Fields) -> str:
    name = "type" if "rope_type" not in rope.raw and "type" in rope.raw else "rope_type"
    rope.get("type")
    kind = rope.choice(name, (*_KINDS, *_OLD_NAMES), "default")
    return _OLD_NAMES.get(kind, kind)


def _original(rope: Fields, lengths: Lengths) -> int:
    inner = rope.integer("original_max_position_embeddings", None)
    return lengths.original or inner or lengths.max_position


def _read_linear(rope: Fields, lengths: Lengths) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _read_dynamic(rope: Fields, lengths: Lengths) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"),
        "original_length": lengths.max_position,
        "fixed_length": max(lengths.served, lengths.max_position),
    }


def _read_llama3(rope: Fields, lengths: Lengths) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"),
        "original_length": _original(rope, lengths),
        "low": rope.number("low_freq_factor"),
        "high": rope.number("high_freq_factor"),
    }


def _read_yarn(rope: Fields, lengths: Lengths) -> dict[str, Any]:
    original = _original(rope, lengths)
    factor = rope.number("factor", lengths.max_position / original)
    numerator, denominator = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if numerator and denominator:
        default = _magnitude(factor, numerator) / _magnitude(factor, denominator)
    else:
        default = _magnitude(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", default),
        "original_length": original,
        "low": rope.number("beta_slow", 0.0) or 1.0,
        "high": rope.number("beta_fast", 0.0) or 32.0,
        "truncate": rope.flag("truncate", True),
    }


def _read_longrope(rope: Fields, lengths: Lengths) -> dict[str, Any]:
    original = _original(rope, lengths)
    factor = rope.number("factor", lengths.max_position / original)
    default = 1.0
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    long, short = rope.numbers("long_factor"), rope.numbers("short_factor")
    return {
        "attention_factor": rope.number("attention_factor", default),
        "divisors": long if lengths.served > original else short,
    }


_KINDS: dict[str, Callable[[Fields, Lengths], dict[str, Any]]] = {
    "default": lambda rope, lengths: {},
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
}
_OLD_NAMES = {"su": "longrope"}


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, with a ramp between."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_length / (num_rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    if first == last:
        last += 0.001  # the ramp must have a width
    steps = torch.arange(rope.dim // 2, dtype=torch.float32)
    slow = ((steps - first) / (last - first)).clamp(0, 1)
    return frequencies / rope.factor * slow + frequencies * (1 - slow)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_length / (2 * math.pi / frequencies)
    smooth = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
