"""What each command of the front does. One for a slot that is gone or elsewhere does nothing:
commands and events cross on their way, so such races are normal."""

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.admission import Admission
from paceline.engine.block_table import BlockTable
from paceline.engine.groups import Groups
from paceline.engine.messages import (
    Adopt,
    Cancel,
    Command,
    Filled,
    Follow,
    GrantedRun,
    Keep,
    LetGo,
    Pulled,
    Refused,
    Release,
    RequestSpec,
    Reserve,
    Reserved,
    Submit,
    TransferClosed,
)
from paceline.engine.sequence import Group, Sequence, Stage

ROW_SLACK = 8  # one in so many rows may be reserved twice: a transfer takes a while


class Commands:
    """Runs in the thread that brings a command, under the engine's lock: a step may compute
    meanwhile, whose result is applied later."""

    def __init__(self, groups: Groups, admission: Admission, num_sums: int):
        self.groups = groups
        self.admission = admission
        self.num_sums = num_sums
        self._arrivals = 0

    def handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Reserve():
                self._reserve(command)
            case LetGo():
                self.groups.let_go(command.slot)
            case TransferClosed():
                self.groups.allocator.pool.close_transfer(command.slot)
            case _:
                group = self.groups.live.get(command.slot)
                if group is not None:
                    self._for_live(group, command)

    def _for_live(
        self, group: Group, command: Pulled | Adopt | Filled | Cancel | Release | Follow | Keep
    ) -> None:
        leader = group.leader
        match command:
            case Pulled() if group.is_filling and leader is not None:
                self._commit_pulled(leader, command)
            case Adopt() if group.is_filling and leader is not None:
                self._adopt(leader, command)
            case Filled() if group.is_filling and leader is not None:
                self._go_on(leader, command.is_copying)
            case Cancel():
                self._cancel(group, command)
            case Release() if group.prefill_only:
                self.groups.end(group)
            case Keep() if group.prefill_only:
                group.is_kept = True
            case Follow() if leader and len(command.first_blocks) == len(leader.tables):
                group.reader_lacks = command.first_blocks

    def _submit(self, command: Submit) -> None:
        scheduler = self.groups.scheduler
        max_waiting = scheduler.config.max_waiting
        if len(scheduler.waiting) + len(self.groups.filling) >= max_waiting:
            message = f"{max_waiting} requests are waiting already"
            self.groups.refuse(command.slot, Overloaded(message))
            return
        group = self._new_group(command.slot, command.request, command.prefill_only)
        if group is not None and group.leader is not None:
            group.num_offered = command.num_offered_blocks
            scheduler.enqueue(group.leader)

    def _reserve(self, command: Reserve) -> None:
        """All or nothing: a row soon, pages of the prompt now, a promise of a window of output.
        What those who wait will need is not given away: they would wait for ever."""
        slot = command.slot
        group = self._new_group(slot, command.request, prefill_only=False)
        if group is None or group.leader is None:
            return
        leader, allocator = group.leader, self.groups.allocator
        scheduler = self.groups.scheduler
        num_choices = len(group.choices)
        allowance = scheduler.allowances.of_request(leader, num_choices, is_pulled=True)
        ahead = scheduler.waiting.pages_before(leader)
        runs = None
        if self._has_row(leader):
            runs = allocator.grant_destination(leader, leader.num_tokens, allowance, ahead)
        if runs is None:
            num_free = max(0, allocator.pool.num_available - ahead)
            self.groups.events.append(Refused(slot, sum(allowance), num_free))
            self.groups.end(group)
            return
        leader.stage = Stage.WAITING_FOR_KV
        group.num_scored = leader.num_tokens  # by who computes the prompt
        num_cached = min(map(_num_cached, leader.tables, runs))
        group.num_cached_tokens = num_cached * PAGE_TOKENS
        self.groups.events.append(Reserved(slot, num_cached, runs))

    def _has_row(self, leader: Sequence) -> bool:
        scheduler = self.groups.scheduler
        wanted, max_running = self.groups.num_rows_wanted(), scheduler.config.max_running
        return wanted < max_running + -(-max_running // ROW_SLACK)

    def _new_group(self, slot: int, spec: RequestSpec, prefill_only: bool) -> Group | None:
        if slot in self.groups.live:
            return None
        self._arrivals += 1
        try:
            group = self.admission.admit(slot, spec, self._arrivals, prefill_only)
        except InvalidRequest as error:
            self.groups.refuse(slot, error)
            return None
        self.groups.live[slot] = group
        return group

    def _commit_pulled(self, leader: Sequence, command: Pulled) -> None:
        """The front has verified these bytes; what does not fit the slot is left unnamed."""
        num_full = leader.num_tokens // PAGE_TOKENS
        if not 0 <= command.group < len(leader.tables):
            return
        for block, checksums in enumerate(command.checksums, command.first_block):
            if 0 <= block < num_full and len(checksums) == self.num_sums:
                self.groups.allocator.commit(leader, command.group, [block], [tuple(checksums)])

    def _adopt(self, leader: Sequence, command: Adopt) -> None:
        group = leader.group
        leader.stage = Stage.WAITING  # the transfer is over
        wanted = [first for first in command.first_tokens if first.choice in group.choices]
        tokens = [(first.choice, first.token_id) for first in wanted if first.finish is None]
        if not tokens:
            self.groups.end(group)
            return
        leader.num_computed = leader.num_tokens
        self.groups.fork(group, tokens)

    def _go_on(self, leader: Sequence, is_copying: bool) -> None:
        """Behind what was filled, if that is all; else it waits again, for the usual grant: what
        has come is found by name like anything else. Pages that a copy may still write stay in
        quarantine until it ends."""
        group, num_filled = leader.group, leader.group.num_offered
        group.num_offered = 0
        self.groups.filling.discard(group)
        if self.groups.allocator.take_filled(leader, num_filled):
            num_cached = num_filled * PAGE_TOKENS
            group.num_cached_tokens = min(num_cached, group.spec.num_prompt_tokens)
            self.groups.announce(group, num_filled)
        else:
            self.groups.allocator.release(leader, group.slot if is_copying else None)
        self.groups.scheduler.enqueue(leader)

    def _cancel(self, group: Group, command: Cancel) -> None:
        left = [choice for choice in group.choices if choice not in command.choices]
        if not command.choices or not left:
            self.groups.end(group)
        elif group.leader is not None:
            group.choices = left
        else:
            for sequence in [s for s in group.sequences if s.choice in command.choices]:
                self.groups.end_choice(sequence)


def _num_cached(table: BlockTable, missing: GrantedRun) -> int:
    """Leading blocks of which a group misses none; 0 where it has found nothing that it needs."""
    found_some = missing.first_block > table.first or not missing.pages
    return missing.first_block if found_some else 0
