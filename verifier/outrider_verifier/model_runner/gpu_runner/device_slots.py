"""Assigns device slots to sessions and uploads changes of their state to the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory, has_penalties
from outrider.engine.swap import SwapSpace
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.sampling import Rule
from outrider_verifier.model_runner.batch import PrefillRow
from outrider_verifier.model_runner.swapped_sessions import SwappedSessions
from outrider_verifier.state.session import Session

TOKEN_MATCHING_RULES = (Rule.GREEDY, Rule.COUPLED)
"""Acceptance rules that compare tokens and need no draft distribution."""
_NOBODY: Final[frozenset[int]] = frozenset()


@dataclass(slots=True, eq=False)
class DeviceSlot:
    """The device slot of a session, which is its index in the state arrays on the GPU, and the
    properties that decide how the session is launched."""

    slot: int
    uses_token_matching: bool
    """Whether the session's acceptance rule compares tokens and needs no draft distribution."""
    has_logits_processing: bool
    """Whether the logits processor changes the session's logits before sampling."""
    uses_rejection: bool = False
    """Whether the session has the rejection rule, which needs the draft distributions."""
    has_current_draft: bool = False
    """Whether the draft that the device holds for the session continues its current prefix."""
    has_full_draft_kv: bool = False
    """Whether the drafter has draft KV for all positions of the session that were written so
    far."""
    uploaded_blocks: int = 0
    """Number of the session's KV blocks that were uploaded to the device."""
    is_plain: bool = field(init=False)
    """Whether acceptance compares tokens and uses the logits unchanged."""

    def __post_init__(self) -> None:
        self.is_plain = self.uses_token_matching and not self.has_logits_processing

    @classmethod
    def create(cls, session: Session, slot: int, *, warped: bool) -> DeviceSlot:
        """Return the device slot of a session that starts in `slot`. `warped` says whether the
        logits processor changes the session's logits."""
        rule = session.spec.sampling.effective_rule
        return cls(
            slot,
            rule in TOKEN_MATCHING_RULES,
            warped,
            uses_rejection=rule is Rule.REJECTION,
            uploaded_blocks=session.kv.num_blocks,
        )


class DeviceSlotTable:
    """Gives device slots to sessions and takes them back.

    Updates of the device are made in stream order, and the host does not wait for them. Updates
    that can be combined are queued until `upload_changes`.
    """

    def __init__(
        self,
        slots: DeviceSessionSlots,
        in_process_drafter: InProcessDrafter | None,
        remote_drafter: RemoteDrafter | None = None,
    ) -> None:
        """Create a table without sessions. At most one of `in_process_drafter` and `remote_drafter`
        is not None."""
        self._slots, self._in_process_drafter = slots, in_process_drafter
        self._remote_drafter = remote_drafter
        self._warps = (
            [slots.warp]
            if in_process_drafter is None
            else [slots.warp, in_process_drafter.logits_slots]
        )
        self._device_slots: dict[int, DeviceSlot] = {}
        """Device slots by the session's ticket."""
        self._grown: dict[int, Session] = {}
        """Sessions with blocks that were not uploaded yet, by ticket."""
        self._suspended = SwappedSessions()
        self._were_whole: set[int] = set()
        """Tickets of suspended sessions for which the in-process drafter had all draft KV."""
        self._blank: set[int] = set()
        """Slots of resumed sessions, which have no in-process draft before their next round."""

    def get_slot(self, session: Session) -> DeviceSlot:
        """Return the device slot of a session that is not suspended."""
        return self._device_slots[session.ticket]

    def get_slots(self, sessions: Sequence[Session]) -> list[DeviceSlot]:
        """Return the device slots of n sessions that are not suspended."""
        device_slots = self._device_slots
        return [device_slots[session.ticket] for session in sessions]

    def resume_session(self, session: Session) -> bool:
        """Resume a suspended session: give it a device slot, and restore its state on the device.
        Return whether its KV was copied back; otherwise its prefix must be prefilled again. An
        in-process draft is not restored, so the session's next round has none."""
        slot = self._slots.open_slot(session.kv)
        kept = self._suspended.swap_in(session)
        # What a grammar allows the in-process drafter to draft, the host says round by round.
        warped = [
            _init_logits_state(warps, slot, session, target=warps is self._slots.warp)
            for warps in self._warps
        ]
        device_slot = self._device_slots[session.ticket] = DeviceSlot.create(
            session, slot, warped=any(warped)
        )
        begun = session.emitted > 0
        self._slots.begin_session(
            slot,
            session.kv,
            session.spec.sampling,
            length=session.length if begun else 1,
            root=session.root if begun else 0,
        )
        if self._in_process_drafter is not None:
            # The head's KV came back with the target's, or is about to be written with it; where
            # the session begins with that of others, it has the head's, too.
            device_slot.has_full_draft_kv = (
                session.ticket in self._were_whole if kept else session.in_process_draft_length > 0
            )
            device_slot.has_current_draft = begun and device_slot.has_full_draft_kv
            if device_slot.has_current_draft:
                self._in_process_drafter.forget_drafts(slot)
                self._blank.add(slot)
        self._were_whole.discard(session.ticket)
        if self._remote_drafter is not None and session.in_process_draft_length:
            # The drafter's KV is not swapped: what it had of this session is lost.
            device_slot.has_full_draft_kv = not kept
            if not kept:
                self._remote_drafter.begin_session(
                    slot,
                    session.kv.blocks,
                    session.spec.sampling,
                    num_rows=session.kv.len,
                    digest=extend_digest(EMPTY_DIGEST, session.tokens[: session.length]),
                    history=_history(session),
                )
                device_slot.has_current_draft = begun
        return kept

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Release a session's device slot and KV blocks. Before that, copy its committed KV to
        `swap` if there is one and it has room. Return whether the KV was copied."""
        device_slot = self._device_slots.pop(session.ticket)
        self._blank.discard(device_slot.slot)
        self._grown.pop(session.ticket, None)
        if device_slot.has_full_draft_kv:
            self._were_whole.add(session.ticket)
        self._close_slot(device_slot.slot)
        return self._suspended.swap_out(session, swap)

    def prefetch_session(self, session: Session) -> bool:
        """Start to copy a suspended session's KV back while rounds run. Return whether
        `resume_session` could now run without delaying a round."""
        return self._suspended.prefetch(session)

    def close_session(self, session: Session) -> None:
        """Free the device slot of a session that has ended, and drop the copy of its KV if it was
        suspended."""
        self._suspended.drop_copy(session)
        self._were_whole.discard(session.ticket)
        self._grown.pop(session.ticket, None)
        device_slot = self._device_slots.pop(session.ticket, None)
        if device_slot is not None:
            self._blank.discard(device_slot.slot)
            self._close_slot(device_slot.slot)

    def _close_slot(self, slot: int) -> None:
        self._slots.close_slot(slot)
        if self._remote_drafter is not None:
            self._remote_drafter.end_session(slot)

    def forget_in_process_drafts(self) -> None:
        """Discard all in-process drafts on the device, because the next rounds have another draft
        shape."""
        assert self._in_process_drafter is not None
        self._in_process_drafter.forget_drafts()
        self._blank.update(
            device_slot.slot
            for device_slot in self._device_slots.values()
            if device_slot.has_current_draft
        )

    def forget_remote_drafts(self) -> None:
        """Record that the drafter on another device is gone, so that no session has drafts or draft
        KV."""
        for device_slot in self._device_slots.values():
            device_slot.has_current_draft = device_slot.has_full_draft_kv = False

    def record_drafts(
        self, device_slots: Sequence[DeviceSlot], prompts: Sequence[PrefillRow], *, own: bool
    ) -> frozenset[int]:
        """Record which sessions have an in-process draft for their prefix after a launch.
        `device_slots` are the slots of its decoding rows, and `prompts` its prefill rows. `own`
        says whether the launch makes such drafts. Return the indices of the decoding rows that have
        no such draft to verify in this launch."""
        if self._in_process_drafter is None and self._remote_drafter is None:
            return _NOBODY
        if not own:
            # The head misses what is written.
            for device_slot in (*device_slots, *(self.get_slot(row.session) for row in prompts)):
                device_slot.has_current_draft = device_slot.has_full_draft_kv = False
            return _NOBODY
        for row in prompts:
            if row.last and row.session.in_process_draft_length:
                device_slot = self.get_slot(row.session)
                device_slot.has_current_draft = device_slot.has_full_draft_kv
        if not self._blank:
            return _NOBODY
        slots = [device_slot.slot for device_slot in device_slots]
        blank = frozenset(n for n, slot in enumerate(slots) if slot in self._blank)
        self._blank.difference_update(slots)
        return blank

    def queue_new_blocks(self, session: Session) -> None:
        """Queue the upload of a session's new blocks. Raises ResourceExhaustedError if a block
        table cannot hold them."""
        self._slots.check_blocks(session.kv.num_blocks)
        self._grown[session.ticket] = session

    def upload_changes(self) -> None:
        """Upload all new sessions and blocks to the device in one step."""
        grown = [(self.get_slot(session), session.kv.blocks) for session in self._grown.values()]
        added = [
            (s.slot, s.uploaded_blocks, blocks[s.uploaded_blocks :])
            for s, blocks in grown
            if len(blocks) > s.uploaded_blocks
        ]
        self._slots.upload_changes(added)
        if self._remote_drafter is not None:
            for slot, first, blocks in added:
                self._remote_drafter.add_blocks(slot, first, blocks)
        # Only now: what the device was not told of is told again.
        for device_slot, blocks in grown:
            device_slot.uploaded_blocks = max(device_slot.uploaded_blocks, len(blocks))
        self._grown.clear()


def _history(session: Session) -> TokenHistory:
    """Return the token history that penalties of a drafter on another device need; it is empty if
    the session has no penalties."""
    if not has_penalties(session.spec.sampling):
        return EMPTY_HISTORY
    known, prompt_len = session.tokens[: session.length], session.spec.prompt_len
    return TokenHistory(
        prompt_ids=np.unique(known[:prompt_len]), output_ids=known[prompt_len:].copy()
    )


def _init_logits_state(warps: LogitsSlots, slot: int, session: Session, *, target: bool) -> bool:
    """Upload the session's settings for the logits processor, with the tokens that it has
    emitted."""
    spec, known = session.spec, session.tokens[: session.length]
    warps.begin_session(
        slot,
        spec.sampling,
        prompt_ids=known[: spec.prompt_len],
        output_ids=known[spec.prompt_len :],
        banned_first=spec.stop_token_ids if spec.min_new_tokens else (),
        banned_until=session.stops_from,
        allowed_tokens=target and session.constraint is not None,
    )
    return warps.has_logits_processing(slot)
