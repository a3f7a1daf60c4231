"""What each command of the front does. One for a slot that is gone or elsewhere does nothing:
commands and events cross on their way, so such races are normal."""

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.admission import Admission
from paceline.engine.groups import Groups
from paceline.engine.messages import (
    Adopt,
    Cancel,
    Command,
    Pulled,
    Refused,
    Release,
    RequestSpec,
    Reserve,
    Reserved,
    Submit,
    TransferClosed,
)
from paceline.engine.sequence import Group, Sequence, Stage, pages_of


class Commands:
    """Runs between steps, in the thread that runs them."""

    def __init__(self, groups: Groups, admission: Admission, num_heads: int, max_waiting: int):
        self.groups = groups
        self.admission = admission
        self.num_heads = num_heads
        self.max_waiting = max_waiting
        self._arrivals = 0

    def handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Reserve():
                self._reserve(command)
            case TransferClosed():
                self.groups.allocator.pool.close_transfer(command.slot)
            case _:
                group = self.groups.live.get(command.slot)
                if group is not None:
                    self._for_live(group, command)

    def _for_live(self, group: Group, command: Pulled | Adopt | Cancel | Release) -> None:
        leader = group.leader
        is_reserved = leader is not None and leader.stage is Stage.WAITING_FOR_KV
        match command:
            case Pulled() if is_reserved and leader is not None:
                self._commit_pulled(leader, command)
            case Adopt() if is_reserved and leader is not None:
                self._adopt(leader, command)
            case Cancel():
                self._cancel(group, command)
            case Release() if group.prefill_only:
                self.groups.end(group)

    def _submit(self, command: Submit) -> None:
        scheduler = self.groups.scheduler
        if len(scheduler.waiting) >= self.max_waiting:
            message = f"{self.max_waiting} requests are waiting already"
            self.groups.refuse(command.slot, Overloaded(message))
            return
        group = self._new_group(command.slot, command.request, command.prefill_only)
        if group is not None and group.leader is not None:
            scheduler.enqueue(group.leader)

    def _reserve(self, command: Reserve) -> None:
        """All or nothing: pages of the prompt now, a promise of a window of output."""
        slot = command.slot
        group = self._new_group(slot, command.request, prefill_only=False)
        if group is None or group.leader is None:
            return
        leader, allocator = group.leader, self.groups.allocator
        credit = self.admission.output_credit(leader, len(group.choices))
        num_hits = allocator.grant(leader, leader.num_tokens // PAGE_TOKENS, credit)
        if num_hits is None:
            needed = pages_of(leader.num_tokens) + credit
            event = Refused(slot, needed, max(0, allocator.pool.num_available))
            self.groups.events.append(event)
            self.groups.end(group)
            return
        leader.stage = Stage.WAITING_FOR_KV
        group.num_cached_tokens = num_hits * PAGE_TOKENS
        self.groups.events.append(Reserved(slot, num_hits, leader.pages[num_hits:]))

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
        for block, checksums in enumerate(command.checksums, command.first_block):
            if 0 <= block < num_full and len(checksums) == self.num_heads:
                self.groups.allocator.commit(leader, block, tuple(checksums))

    def _adopt(self, leader: Sequence, command: Adopt) -> None:
        group = leader.group
        wanted = [first for first in command.first_tokens if first.choice in group.choices]
        tokens = [(first.choice, first.token_id) for first in wanted if first.finish is None]
        if not tokens:
            self.groups.end(group)
            return
        leader.num_computed = leader.num_tokens
        self.groups.fork(group, tokens)

    def _cancel(self, group: Group, command: Cancel) -> None:
        left = [choice for choice in group.choices if choice not in command.choices]
        if not command.choices or not left:
            self.groups.end(group, command.transfer_open)
        elif group.leader is not None:
            group.choices = left
        else:
            for sequence in [s for s in group.sequences if s.choice in command.choices]:
                self.groups.end_choice(sequence)
