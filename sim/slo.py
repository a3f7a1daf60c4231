"""What a request was promised, and whether it got it."""

from dataclasses import dataclass

from paceline.core.config import setting
from paceline.core.errors import ConfigError
from paceline.sim.trace import Arrival


@dataclass(frozen=True, slots=True)
class Slo:
    """What requests are promised.

    Time to first token at most `ttft_s` + `ttft_token_s` x prompt tokens; time between the tokens
    after it at most `itl_s`, on average.
    """

    ttft_s: float = setting(1.0, "Promised time to the first token, in seconds, …")
    ttft_token_s: float = setting(1e-4, "… and this for each token of the prompt.")
    itl_s: float = setting(0.040, "Promised time between tokens, on average, in seconds.")

    def __post_init__(self) -> None:
        for name in ("ttft_s", "ttft_token_s", "itl_s"):
            limit_s: float = getattr(self, name)
            ConfigError.check(name, limit_s, limit_s >= 0, "must not be negative")

    def ttft_limit_s(self, arrival: Arrival) -> float:
        return self.ttft_s + self.ttft_token_s * arrival.num_prompt_tokens

    def is_met(self, arrival: Arrival, ttft_s: float, total_s: float) -> bool:
        num_gaps = max(1, arrival.num_output_tokens - 1)
        in_time = ttft_s <= self.ttft_limit_s(arrival)
        return in_time and total_s - ttft_s <= self.itl_s * num_gaps
