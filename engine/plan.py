"""What one step computes."""

from dataclasses import dataclass

from paceline.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_new` tokens of a sequence behind `context`, computed before; `choices`: one token is
    drawn for each, none if it stays short of its last token or wants none. `scored`: positions
    whose logits are scored for the prompt's next token; `pooled`: those whose hidden states are
    pooled. `epoch` is the sequence's at launch: another one later means that the result no longer
    counts."""

    sequence: Sequence
    num_new: int
    context: int
    epoch: int
    choices: tuple[int, ...]
    scored: range
    pooled: range

    @property
    def is_current(self) -> bool:
        return self.sequence.epoch == self.epoch


@dataclass(frozen=True, slots=True)
class Plan:
    """Decodes (one token each) first, then chunks of prompts."""

    decodes: list[Scheduled]
    chunks: list[Scheduled]

    @property
    def scheduled(self) -> list[Scheduled]:
        return self.decodes + self.chunks if self.chunks else self.decodes

    def current(self) -> "Plan":
        """Without those that ended since it was made."""
        if all(entry.is_current for entry in self.scheduled):
            return self
        decodes = [entry for entry in self.decodes if entry.is_current]
        return Plan(decodes, [entry for entry in self.chunks if entry.is_current])

    @property
    def num_chunk_tokens(self) -> int:
        return sum(entry.num_new for entry in self.chunks)


def schedule(sequence: Sequence, num_new: int) -> Scheduled:
    group = sequence.group
    choices: tuple[int, ...] = ()
    if num_new == sequence.num_remaining and group.pooled is None:
        choices = tuple(group.choices) if group.leader is sequence else (sequence.choice,)
    start = sequence.num_computed
    end = start + num_new
    scored, pooled = group.to_score(start, end), group.to_pool(start, end)
    return Scheduled(sequence, num_new, start, sequence.epoch, choices, scored, pooled)
