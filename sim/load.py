"""Which load is replayed: a trace, or synthetic sessions. `paceline sim` and `paceline bench`."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from paceline.core.config import check_positive, setting
from paceline.core.errors import ConfigError
from paceline.sim.trace import BLOCK_TOKENS, Arrival, read_mooncake, shared_prefix_sessions

_NONE = "name a file, benchmarks/traces/ has one; or a number of --sessions"


@dataclass(frozen=True, slots=True)
class Sessions:
    """Synthetic load, instead of a trace: sessions under one prefix, each turn repeats the last."""

    sessions: int = setting(0, "How many sessions; 0: a trace is replayed.")
    turns: int = setting(5, "Requests of each session.")
    prefix_tokens: int = setting(2048, f"That all share, in steps of {BLOCK_TOKENS}.")
    turn_tokens: int = setting(512, f"Prompt tokens that a turn adds, in steps of {BLOCK_TOKENS}.")
    output_tokens: int = setting(100, "Of each answer.")
    pause_s: float = setting(4.0, "Mean time between two turns of a session.")

    def __post_init__(self) -> None:
        ConfigError.check("sessions", self.sessions, self.sessions >= 0, "must not be negative")
        check_positive(self, "turns", "turn_tokens", "output_tokens", "pause_s")
        for name in ("prefix_tokens", "turn_tokens"):
            count: int = getattr(self, name)
            fits = count >= 0 and count % BLOCK_TOKENS == 0
            ConfigError.check(name, count, fits, f"must be a multiple of {BLOCK_TOKENS}")


def check_load(trace: str, sessions: Sessions) -> None:
    """Raises ConfigError unless one of both is given."""
    if sessions.sessions:
        ConfigError.check("trace", trace, not trace, "leave it out, or --sessions")
        return
    ConfigError.check("trace", trace, bool(trace), _NONE)
    ConfigError.check("trace", trace, Path(trace).is_file(), "is no file")


def arrivals_of(trace: str, sessions: Sessions, num_requests: int, seed: int) -> list[Arrival]:
    """The first requests, in the order in which they come. Raises ConfigError at a wrong line."""
    if not sessions.sessions:
        found = read_mooncake(Path(trace), num_requests)
        ConfigError.check("trace", trace, bool(found), "holds no request")
        return found
    made = shared_prefix_sessions(
        sessions.sessions,
        sessions.turns,
        prefix_tokens=sessions.prefix_tokens,
        turn_tokens=sessions.turn_tokens,
        output_tokens=sessions.output_tokens,
        pause_s=sessions.pause_s,
        seed=seed,
    )
    return list(islice(made, num_requests))
