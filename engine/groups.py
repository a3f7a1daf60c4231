"""Live slots, and the two things that change their shape: forking and ending."""

from paceline.core.errors import PacelineError
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.allocator import Allocator
from paceline.engine.allowances import Pages
from paceline.engine.kept_prompts import KeptPrompts
from paceline.engine.messages import Committed, Ended, Event, Failed, Fill, GrantedRun
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Group, Sequence, Stage


class Groups:
    """`events` collects what the front must hear, in order."""

    def __init__(self, scheduler: Scheduler, allocator: Allocator, runner: Runner) -> None:
        self.scheduler = scheduler
        self.allocator = allocator
        self.runner = runner
        self.live: dict[int, Group] = {}
        self.filling: set[Group] = set()  # that go on here, behind KV that comes from outside
        self.kept = KeptPrompts(allocator.pool)
        self.events: list[Event] = []
        scheduler.on_fill = self.fill

    def refuse(self, slot: int, error: PacelineError) -> None:
        """A slot that never lived."""
        self.events.append(Failed(slot, error.code, error.message, error.field))
        self.events.append(Ended(slot))

    def fail(self, group: Group, error: PacelineError) -> None:
        self.events.append(Failed(group.slot, error.code, error.message, error.field))
        self.end(group)

    def fill(self, sequence: Sequence, missing: list[GrantedRun]) -> None:
        """Asks for KV from outside; until it is here, the sequence has pages but no row."""
        sequence.stage = Stage.WAITING_FOR_KV
        self.filling.add(sequence.group)
        self.events.append(Fill(sequence.group.slot, missing))

    def announce(self, group: Group, num_blocks: int) -> None:
        """Tells a reader what it can pin by now."""
        if group.prefill_only and num_blocks > group.num_announced:
            group.num_announced = num_blocks
            self.events.append(Committed(group.slot, num_blocks))

    def end(self, group: Group) -> None:
        """Lets go of everything. Pages that a transfer fills stay in quarantine until it closes."""
        transfer_slot = group.slot if group.is_filling else None
        if group.is_kept:
            pages = [page for s in group.sequences for table in s.tables for page in table.held]
            self.kept.keep(group.slot, pages)
        for sequence in group.sequences:
            self._let_go(sequence, transfer_slot)
        self._forget(group)

    def let_go(self, slot: int) -> None:
        """Nothing of it is kept longer."""
        self.kept.let_go(slot)
        if (group := self.live.get(slot)) is not None:
            group.is_kept = False

    def num_rows_wanted(self) -> int:
        """Choices that are in the batch, or will be without waiting for pages."""
        scheduler = self.scheduler
        filling = sum(len(group.choices) for group in self.live.values() if group.is_filling)
        return len(scheduler.state) + len(scheduler.ready) + filling

    def end_choice(self, sequence: Sequence) -> None:
        group = sequence.group
        self._let_go(sequence, None)
        group.sequences.remove(sequence)
        group.choices.remove(sequence.choice)
        if not group.sequences:
            self._forget(group)

    def fork(self, group: Group, tokens: list[tuple[int, int]]) -> None:
        """The leader goes on as the first of these (choice, token), the others are forked off.

        One for which there is no page is computed again later, from the prefix cache if it can.
        """
        leader = group.leader
        assert leader is not None and tokens
        group.leader = None
        group.choices = [choice for choice, _ in tokens]
        others = [leader.fork(choice) for choice in group.choices[1:]]
        group.sequences += others
        allowance = self.scheduler.allowances.of_choice(group.max_length)
        self.allocator.split_credit(leader, others, allowance)
        self._share_pages(leader, others, allowance)
        leader.choice = group.choices[0]
        leader.order = (*leader.order[:2], leader.choice)
        for sequence, (_, token_id) in zip(group.sequences, tokens, strict=True):
            self.scheduler.state.append(sequence, token_id)
            if sequence.row < 0:
                self.scheduler.enqueue(sequence)

    def _share_pages(self, leader: Sequence, others: list[Sequence], allowance: Pages) -> None:
        copied: list[int] = []
        for other in others:
            own = self.allocator.share_prefix(leader, other, allowance)
            if own is None:
                self.allocator.release(other)
            else:
                copied += own
        if copied:
            block = leader.num_computed // PAGE_TOKENS
            sources = [table.pages[block] for table in leader.tables]
            self.runner.copy_pages(sources * (len(copied) // len(sources)), copied)

    def _let_go(self, sequence: Sequence, transfer_slot: int | None) -> None:
        self.scheduler.drop(sequence)
        self.allocator.release(sequence, transfer_slot)

    def _forget(self, group: Group) -> None:
        with self.allocator.pool.lock:
            self.allocator.cache.tails.pop(group.slot, None)
        del self.live[group.slot]
        self.filling.discard(group)
        self.events.append(Ended(group.slot))
