"""What a request was promised, and whether it got it."""

from dataclasses import dataclass

from paceline.sim.trace import Arrival


@dataclass(frozen=True, slots=True)
class Slo:
    """Time to first token at most `ttft_s` + `ttft_token_s` x prompt tokens; time between the
    tokens after it at most `itl_s`, on average."""

    ttft_s: float = 1.0
    ttft_token_s: float = 1e-4
    itl_s: float = 0.040
    share: float = 0.9  # of requests that have to meet it

    def ttft_limit_s(self, arrival: Arrival) -> float:
        return self.ttft_s + self.ttft_token_s * arrival.num_prompt_tokens

    def is_met(self, arrival: Arrival, ttft_s: float, total_s: float) -> bool:
        num_gaps = max(1, arrival.num_output_tokens - 1)
        in_time = ttft_s <= self.ttft_limit_s(arrival)
        return in_time and total_s - ttft_s <= self.itl_s * num_gaps
