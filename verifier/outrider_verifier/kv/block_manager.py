"""BlockManager: gives KV blocks to sessions by admission, growth and preemption.

Used on the engine thread only, between rounds. It gathers the inputs of the policy in `preemption`
and carries out its actions. A preempted session keeps everything but its KV: tokens, digest,
handle, drafter, held proposals, features, grammar state. Runner state of the session (stream keys,
token counts, an in-process draft) is saved and restored by `ModelRunner.suspend_session` and
`resume_session`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Final, NamedTuple

from outrider import timeline
from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from outrider.ids import SessionId
from outrider_verifier.kv.preemption import (
    Action,
    KVPoolState,
    OutputLengthStats,
    Preempt,
    PreemptionLimits,
    SessionClaim,
    admit_all,
    can_all_run,
    choose_mode,
    plan_preemption,
)
from outrider_verifier.kv.prefix_cache import PrefixCache
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.state.preemption_mode import PreemptionMode
from outrider_verifier.state.round_plan import TIME_EMA_WEIGHT
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED, SWAPPED

logger = logging.getLogger(__name__)

GUARD_TOKENS: Final = 32
GUARD_S: Final = 1.0
"""A resumed session is protected from preemption until it has committed `GUARD_TOKENS` tokens or
`GUARD_S` seconds have passed."""
GROWTH_TOKENS: Final = 64
"""Tokens for which a session reserves blocks in advance while KV is plentiful, since reserving
several blocks costs as much as reserving one."""
AMPLE_FREE_BLOCKS_FACTOR: Final = 4
"""KV is plentiful while the number of free blocks exceeds this factor times the number of blocks
that all running sessions reserve in advance (`GROWTH_TOKENS`)."""
CHECK_INTERVAL_S: Final = 0.02
"""Interval, in seconds, at which the preemption policy runs again while sessions wait and nothing
else changes."""


class Admission(NamedTuple):
    """The result of admitting a waiting session for which blocks were found."""

    session: Session
    error: Exception | None = None
    """The error that prevented the admission although there were blocks; the session still waits,
    and the caller must fail it. None if the session runs."""
    has_prefix: bool = False
    """Whether a part of the session's prompt was found in the prefix cache."""
    is_swapped_in: bool = False
    """Whether the session's KV was copied back from the swap space."""


class BlockManager:
    """Manages the running and waiting sessions of a verifier, and the KV block pool that they
    share."""

    def __init__(
        self,
        *,
        pool: KVPool,
        runner: ModelRunner,
        swap: SwapSpace | None,
        bounds: PreemptionLimits,
        way: PreemptionMode | None,
        prefixes: PrefixCache | None,
        counters: Counter[str],
    ) -> None:
        """Create a manager without sessions. `swap` is the swap space for preempted sessions, if
        any. `way` is how preempted sessions get their KV back; None chooses the cheaper mode by
        measured costs. `bounds` are the limits of the preemption policy. `prefixes` is the prefix
        cache; None disables it. The manager uses only the blocks of `pool` that are free when it is
        created."""
        self._pool, self._runner, self._swap = pool, runner, swap
        self._bounds, self._way = bounds, way
        self._prefixes = prefixes
        self._counters = counters
        self._total = pool.free_blocks
        self.running: dict[SessionId, Session] = {}
        """Sessions with KV, in the order in which they were admitted."""
        self.waiting: dict[SessionId, Session] = {}
        self.lengths = OutputLengthStats()
        """Statistics of the lengths of finished answers."""
        self._admissions: list[Admission] = []
        """Admissions since the last call of `take_admissions`."""
        self.max_session_preemptions = 0
        """Highest number of preemptions of one session so far."""
        self.pressed = False
        """Whether a session of the round in flight must be preempted or recomputed once the round
        is finished."""
        self._recompute_s = 0.0
        """Time to prefill one token, in seconds; 0 if unknown."""
        self._seen, self._again_at = -1, 0.0
        """The value of `touched` when the policy was last asked, and the time at which to ask it
        again."""

    def max_blocks(self, max_len: int) -> int:
        """Return the number of KV blocks that a session of at most `max_len` tokens may ever need,
        under any speculation plan."""
        # The last token is never written.
        return self._pool.blocks_for(max_len - 1 + self._runner.slot_headroom.max_slots)

    def add_session(self, session: Session) -> None:
        """Add an opened session to the waiting sessions. Raises InvalidRequestError if the session
        can never run."""
        self._runner.open_session(session)
        self.waiting[session.session_id] = session

    def remove_session(self, session: Session) -> None:
        """Forget a session, and free its KV and its state in the runner. Calling this again has no
        effect."""
        # The runner knows the sessions that run or wait.
        running = self.running.pop(session.session_id, None)
        waiting = self.waiting.pop(session.session_id, None)
        session.kv.release()
        if running is not None or waiting is not None:
            self._runner.close_session(session)

    def store_prefix(self, session: Session) -> None:
        """Store the session's KV in the prefix cache, if there is one."""
        if self._prefixes is not None and not session.is_waiting:
            self._prefixes.store_prefix(session)

    @property
    def prefix_blocks(self) -> int:
        """Number of blocks in the prefix cache."""
        return 0 if self._prefixes is None else len(self._prefixes)

    @property
    def prefix_feature_bytes(self) -> int:
        """Host memory, in bytes, that the features of cached blocks take."""
        return 0 if self._prefixes is None else self._prefixes.feature_bytes

    @property
    def swapped_bytes(self) -> int:
        """Host memory, in bytes, that the KV of swapped sessions takes."""
        return 0 if self._swap is None else self._swap.used_bytes

    def next_check_at(self, now: float) -> float | None:
        """Return the time at which the preemption policy must run again even if nothing changes;
        None if no session waits."""
        return max(now, self._again_at) if self.waiting else None

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that prefilling `tokens` tokens took `seconds`."""
        each_s = seconds / tokens
        self._recompute_s = (
            self._recompute_s + TIME_EMA_WEIGHT * (each_s - self._recompute_s)
            if self._recompute_s
            else each_s
        )

    def recompute_s(self, session: Session) -> float:
        """Return the estimated time, in seconds, to recompute the session's KV; 0 if no prefill was
        measured yet."""
        return self._recompute_s * session.kv.len

    def expected_tokens_left(self, session: Session) -> int:
        """Return the number of tokens that a session is expected to emit from now on."""
        return self._expected_answer(session) - session.emitted - _emitted_before(session)

    def take_admissions(self) -> list[Admission]:
        """Return the admissions since the last call, in order. The caller must fail the sessions
        with an error and inform the drafters of the admitted ones."""
        admissions, self._admissions = self._admissions, []
        return admissions

    # ---- before a round ------------------------------------------------------------------------

    def grow_running(self) -> bool:
        """Reserve the blocks that each running session needs for its next rounds. Return False if
        too few blocks are free. In most rounds no session needs new blocks."""
        short = [s for s in self.running.values() if s.length > s.covered_len]
        return not short or self._hold_all(short, 0)

    def grow_sessions(self, sessions: Iterable[Session], tokens: int) -> None:
        """Reserve the blocks that `sessions` will need when up to `tokens` more tokens of each are
        committed, and upload the new blocks to the device. This is called while a round runs or
        drafters draft, so that the next round need not wait for it. If too few blocks are free,
        nothing is uploaded."""
        short = [s for s in sessions if s.length + tokens > s.covered_len and s.phase is not ENDED]
        if short and self._hold_all(short, tokens):
            self._runner.upload_new_blocks()

    def prepare_round(self, now: float, *, touched: int, in_flight: Container[SessionId]) -> bool:
        """Before a round is planned, admit and preempt sessions as the policy decides, and reserve
        blocks for every running session. Return False if the round in flight must be finished
        first, because the policy preempts a session in `in_flight`. `touched` is the counter
        `EngineCore.touched`: if it has changed, sessions may have changed."""
        grown = self.grow_running()
        due = self.waiting and (touched != self._seen or now >= self._again_at)
        if grown and not due and not self.pressed:
            return True
        actions = self._plan_actions(now, grown=grown)
        self.pressed = any(
            [isinstance(action, Preempt) and action.session_id in in_flight for action in actions]
        )
        if self.pressed:
            return False
        self._seen, self._again_at = touched, now + CHECK_INTERVAL_S
        self._act(actions, now)
        if not grown and not self.grow_running():
            raise AssertionError("blocks were preempted for and are not there")
        return True

    def _plan_actions(self, now: float, *, grown: bool) -> list[Action]:
        running, waiting = self.running.values(), self.waiting.values()
        if grown and can_all_run(
            max_blocks=sum([session.max_blocks for session in (*running, *waiting)]),
            sessions=len(running) + len(waiting),
            total_blocks=self._total,
            bounds=self._bounds,
        ):
            return admit_all([self._brief_claim(session, now) for session in waiting], self._bounds)
        state = KVPoolState(
            free_blocks=self._pool.free_blocks,
            total_blocks=self._total,
            running=[self._claim(session, now) for session in running],
            waiting=[self._claim(session, now) for session in waiting],
        )
        return plan_preemption(state, self._bounds)

    def _brief_claim(self, session: Session, now: float) -> SessionClaim:
        """Return the claim of a waiting session with the fields that `admit_all` needs."""
        most = session.max_blocks
        held_next = session.kv_len + self._runner.slot_headroom.slots_beyond(session)
        return SessionClaim(
            session_id=session.session_id,
            priority=session.spec.priority,
            opened_at=session.opened_at,
            blocks=0,
            next_blocks=self._pool.blocks_for(held_next),
            max_blocks=most,
            expected_blocks=most,
            preemptions=session.preemption.count,
            waited_s=session.waited_s(now),
        )

    def _claim(self, session: Session, now: float) -> SessionClaim:
        beyond = self._runner.slot_headroom.slots_beyond(session)
        expected = session.spec.prompt_len + self._expected_answer(session) + beyond
        lately = (
            session.length - session.preemption.resumed_len < GUARD_TOKENS
            and now - session.preemption.resumed_at < GUARD_S
        )
        return self._brief_claim(session, now)._replace(
            blocks=session.kv.num_blocks,
            shared=tuple(self._pool.ledger.shared_blocks(session.kv.blocks)),
            expected_blocks=min(session.max_blocks, self._pool.blocks_for(expected)),
            tokens=session.kv.len,
            is_protected=session.preemption.count > 0 and lately,
        )

    def _expected_answer(self, session: Session) -> int:
        """Return the expected length of the session's answer in tokens, including tokens of earlier
        epochs."""
        before = _emitted_before(session)
        return self.lengths.expected_len(
            before + session.emitted, before + session.spec.max_new_tokens
        )

    def _ahead(self) -> int:
        """Return the number of tokens for which sessions reserve blocks in advance; 0 if KV is not
        plentiful."""
        most = len(self.running) * self._pool.blocks_for(GROWTH_TOKENS) * AMPLE_FREE_BLOCKS_FACTOR
        return GROWTH_TOKENS if not self.waiting and self._pool.free_blocks > most else 0

    # ---- effects -------------------------------------------------------------------------------

    def _hold_all(self, sessions: Sequence[Session], tokens: int) -> bool:
        """Reserve blocks for `tokens` more tokens of each session, or for more if KV is plentiful.
        Return whether all sessions got their blocks."""
        tokens = max(tokens, self._ahead())
        return all([self._hold(session, tokens) for session in sessions])

    def _hold(self, session: Session, tokens: int) -> bool:
        """Reserve blocks for `tokens` more tokens of a session, but none beyond its maximum length.
        Return whether there were enough."""
        beyond = self._runner.slot_headroom.slots_beyond(session)
        tokens = min(tokens, session.max_len - session.length)
        if not session.kv.reserve(session.kv_len + tokens + beyond):
            return False
        session.record_blocks(beyond)
        self._runner.record_new_blocks(session)
        return True

    def _act(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Preempt):
                self.preempt_session(self.running[action.session_id], now)
                continue
            session = self.waiting[action.session_id]
            if self.running and not self._runner.prefetch_session(session):
                # The session's KV is copied while rounds run, which do not wait for the copy; one
                # session is copied at a time.
                self._seen = -1
                return
            admitted = self._admit(session, action.blocks, now)
            if admitted and session.preemption.count:
                self._counters["resumed_preemption"] += 1
                timeline.mark_instant("resumed")

    def preempt_session(self, session: Session, now: float) -> None:
        """Preempt a running session that is in no round. The session waits to be admitted again."""
        swap = self._swap if self._mode_of(session) is PreemptionMode.SWAP else None
        self.store_prefix(session)
        way = (
            PreemptionMode.SWAP
            if self._runner.suspend_session(session, swap)
            else PreemptionMode.RECOMPUTE
        )
        session.mark_preempted(now, swapped=way is PreemptionMode.SWAP)
        self.max_session_preemptions = max(self.max_session_preemptions, session.preemption.count)
        del self.running[session.session_id]
        self.waiting[session.session_id] = session
        self._counters[f"preemptions_{way.value}"] += 1
        timeline.mark_instant(f"preempted, to {way.value}")

    def _mode_of(self, session: Session) -> PreemptionMode:
        count, swap = session.kv.len, self._swap
        fits = swap is not None and count and swap.has_room_for(count)
        return choose_mode(
            swap_s=swap.round_trip_s(count) if swap is not None and fits else None,
            recompute_s=self.recompute_s(session),
            wanted=self._way,
        )

    def can_recompute(self, session: Session) -> bool:
        """Return whether a running session could free its blocks and then allocate the same number
        again.

        Blocks that it shares with other sessions do not become free, so there must be free blocks
        in their place.
        """
        shared = self._pool.ledger.shared_blocks(session.kv.blocks)
        return len(shared) <= self._pool.free_blocks

    def recompute_session(self, session: Session, now: float) -> None:
        """Make a running session prefill its whole prefix again, so that its draft KV is computed
        too. The session must be in no round, and `can_recompute` must be true for it. The session
        is admitted again immediately, and this does not count as a preemption."""
        blocks = session.kv.num_blocks
        self._runner.suspend_session(session, None)
        del self.running[session.session_id]
        self.waiting[session.session_id] = session
        session.mark_recomputing(now)
        self._admit(session, blocks, now)

    def forget_draft_kv(self) -> None:
        """Mark the draft KV of all cached blocks as absent, because the drafter has changed."""
        if self._prefixes is not None:
            self._prefixes.forget_draft_kv()

    def _admit(self, session: Session, blocks: int, now: float) -> bool:
        """Admit a session with `blocks` blocks. Return False if this failed; the session then still
        waits."""
        slots, found, told = blocks * self._pool.block_tokens, 0, session.written_positions
        if self._prefixes is not None and session.phase is not SWAPPED:
            found = self._prefixes.attach_prefix(session, slots)
        held = found > 0 or session.kv.reserve(slots)
        assert held, (session.session_id, blocks)
        try:
            kept = self._runner.resume_session(session)
        except Exception as bug:
            self._admissions.append(Admission(session, bug))
            return False
        session.mark_admitted(now, kept=kept, found=found)
        session.record_blocks(self._runner.slot_headroom.slots_beyond(session))
        del self.waiting[session.session_id]
        self.running[session.session_id] = session
        self._admissions.append(
            Admission(session, has_prefix=session.written_positions > told, is_swapped_in=kept)
        )
        return True


def _emitted_before(session: Session) -> int:
    """Return the number of tokens that earlier epochs of a session emitted."""
    return len(session.spec.token_ids) - session.spec.prompt_len
