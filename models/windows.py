"""How far each layer sees, as the families' configs say it. 0 means all of the context."""

from collections.abc import Sequence

from paceline.models.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def read_window(fields: Fields, default: int | None = None) -> int:
    """`sliding_window`, whose null means none."""
    if fields.is_null("sliding_window"):
        return 0
    return fields.integer("sliding_window", default) or 0


def read_switched_window(fields: Fields, default: int | None = None) -> int:
    """The same, where `use_sliding_window` switches it on."""
    window = read_window(fields, default)
    return window if fields.flag("use_sliding_window", False) else 0


def uniform_windows(fields: Fields, num_layers: int, window: int) -> tuple[int, ...]:
    """All layers see equally far; `layer_types`, if it is there, must say the same."""
    kind = SLIDING if window else FULL
    if set(read_types(fields, (kind,) * num_layers)) != {kind}:
        raise fields.error("layer_types", fields.get("layer_types"), f"must all be {kind}")
    return (window,) * num_layers


def typed_windows(fields: Fields, window: int, default: Sequence[str]) -> tuple[int, ...]:
    """By `layer_types`, with its default."""
    types = read_types(fields, default)
    if SLIDING in types and not window:
        reason = f"a window is needed by layers of {SLIDING}"
        raise fields.error("sliding_window", fields.get("sliding_window"), reason)
    return tuple(window if kind == SLIDING else 0 for kind in types)


def late_windows(fields: Fields, num_layers: int, window: int) -> tuple[int, ...]:
    """Qwen's default: a window from layer `max_window_layers` on."""
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = [SLIDING if window and layer >= first else FULL for layer in range(num_layers)]
    return typed_windows(fields, window, default)


def read_types(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`, one a layer."""
    types = fields.get("layer_types", list(default))
    known = isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)
    if not known or len(types) != len(default):
        reason = f"must name {FULL} or {SLIDING} for each of {len(default)} layers"
        raise fields.error("layer_types", types, reason)
    return tuple(types)
