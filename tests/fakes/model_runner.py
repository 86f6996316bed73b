"""A round runner that stands for a device: it knows each session's prefix by itself, so that a
round can be submitted before the host has seen the one before it.

Texts are those of a `FakeTarget`; how much of an in-process draft stands follows from the prefix.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from outrider_verifier.exchange.shm_features import ShmAllocator
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.interface import (
    DecodeOutput,
    DraftShapeTimes,
    RoundHandle,
    RowOutput,
    RunnerOutput,
)
from outrider_verifier.model_runner.kv_headroom import KVHeadroom
from outrider_verifier.model_runner.swapped_sessions import SwappedSessions
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from outrider.errors import ResourceExhaustedError
from tests.fakes.target import FakeTarget

Verify = Sequence[VerifyRow]


@dataclass(eq=False)
class FakeFlight:
    """A round whose outcome is known and not yet told."""

    prefill: list[PrefillRow]
    verify: list[VerifyRow]
    outcome: RunnerOutput
    written: list[int]
    """KV rows that each session keeps, prompts first."""
    ahead: bool
    """Whether it was submitted while another one was in flight."""
    launched_at: float


class FakeRunner:
    """Implements `ModelRunner`; drafts by itself unless `drafts` is 0."""

    can_run_ahead = True
    chunk_tokens = 4
    max_prompt_tokens: int | None = None

    def __init__(self, target: FakeTarget, *, drafts: int = 3, slots: int = 64) -> None:
        self.target = target
        self.in_process_draft_length = drafts
        self.draft_s = 0.0
        """What an in-process draft of one row takes."""
        self.slot_headroom = KVHeadroom(
            16, rounds=2, in_process_slots=2 * (drafts + 1) if drafts else 0
        )
        self.flights: list[FakeFlight] = []
        """All that were ever submitted."""
        self.in_flight: deque[FakeFlight] = deque()
        self.most_in_flight = 0
        self.prefixes: dict[int, list[int]] = {}
        """What the device holds: the prefix by the ticket of every session that is not
        suspended."""
        self.suspended: dict[int, list[int]] = {}
        """The prefixes of those that are: empty where nothing was swapped out."""
        self._copies = SwappedSessions()
        self._capacities: dict[int, int] = {}
        """KV slots that the device knows of, by ticket."""
        self.before_submit: Callable[[Verify], None] | None = None
        """May raise."""
        self.before_collect: Callable[[FakeFlight], None] | None = None
        """May raise or wait."""
        self.is_usable = True
        """Set it to False for a device that is lost."""
        self.times: tuple[float, float] | None = None
        """Seconds of a round without and with in-process drafts."""
        self.verify_times: Callable[[int, int], float] | None = None
        """Seconds of a round by rows and nodes, with drafts from outside."""
        self.lands: Callable[[], bool] = lambda: True
        """Whether the round in flight has ended."""
        self._slots = slots

    @property
    def rounds_ahead(self) -> int:
        """Rounds that were submitted while another one was in flight."""
        return sum(flight.ahead for flight in self.flights)

    def enter_thread(self) -> None:
        """Nothing to do."""

    def plain_round_s(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """As set."""
        return None if self.times is None else self.times[own]

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """Chains, where there are drafts."""
        if not self.in_process_draft_length:
            return ()
        seconds = math.nan if self.times is None else self.times[True]
        return (DraftShapeTimes(1 + self.in_process_draft_length, False, seconds),)

    def set_draft_shape(self, num_nodes: int) -> None:
        """Nothing to do."""

    def verify_round_s(self, rows: int, nodes: int) -> float | None:
        """As set."""
        return None if self.verify_times is None else self.verify_times(rows, nodes)

    def is_finished(self, flight: RoundHandle) -> bool:
        """As set."""
        return self.lands()

    @staticmethod
    def pin_memory(memory: NDArray[np.uint8]) -> bool:
        """There are no features."""
        return False

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """The same."""

    @staticmethod
    def make_swap_space(budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Room for the pool's KV, which nobody reads."""
        return SwapSpace(budget_bytes, [pool.storage], block_tokens=pool.block_tokens)

    def open_session(self, session: Session) -> None:
        """Let the session wait."""
        if not self.is_usable:
            raise RuntimeError("the device is lost")
        assert session.ticket not in self.prefixes
        self.suspended[session.ticket] = []

    def close_session(self, session: Session) -> None:
        """Give the slot back, or forget the session that waits."""
        held = self.suspended if session.ticket in self.suspended else self.prefixes
        del held[session.ticket]
        self._copies.drop_copy(session)

    def record_new_blocks(self, session: Session) -> None:
        """The device is told of the new blocks."""
        self._capacities[session.ticket] = session.kv.capacity

    def upload_new_blocks(self) -> None:
        """It was told already."""

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Take the slot; the prefix is kept where the KV is."""
        in_flight = [*self.in_flight]
        assert all(
            row.session is not session
            for flight in in_flight
            for row in (*flight.prefill, *flight.verify)
        )
        prefix = self.prefixes.pop(session.ticket)
        kept = self._copies.swap_out(session, swap)
        self.suspended[session.ticket] = prefix if kept else []
        return kept

    def has_draft_kv(self, session: Session) -> bool:
        """Whether it drafts for it."""
        return self.in_process_draft_length > 0 and session.in_process_draft_length > 0

    def prefetch_session(self, session: Session) -> bool:
        """See `ModelRunner`."""
        return self._copies.prefetch(session)

    def resume_session(self, session: Session) -> bool:
        """Take a slot."""
        if len(self.prefixes) >= self._slots:
            raise ResourceExhaustedError("no session slot is free", reason="SESSIONS_EXHAUSTED")
        kept = self._copies.swap_in(session)
        prefix = self.suspended.pop(session.ticket)
        if not kept:
            # Its blocks may begin with what another session has written.
            prefix += session.tokens[: session.kv.len].tolist()
            if session.emitted and len(prefix) == session.length - 1:
                prefix.append(session.root)
        self.prefixes[session.ticket] = prefix
        self.record_new_blocks(session)
        return kept

    def submit_round(self, prefill: Sequence[PrefillRow], verify: Verify) -> FakeFlight:
        """Compute the round from the device's own prefixes."""
        if self.before_submit is not None:
            self.before_submit(verify)
        in_flight = {row.session.ticket for flight in self.in_flight for row in flight.verify}
        for row in verify:
            # What a round says decides what is drafted next.
            assert row.held is None or row.session.ticket not in in_flight
        written: list[int] = []
        outcomes: list[RowOutput] = []
        for chunk in prefill:
            outcomes.append(self._prefill(chunk))
            written.append(chunk.num_tokens)
        for row in verify:
            outcome = self._verify(row)
            outcomes.append(outcome)
            written.append(len(outcome.tokens))
        flight = FakeFlight(
            prefill=list(prefill),
            verify=list(verify),
            outcome=RunnerOutput(
                prefill=outcomes[: len(prefill)],
                decoded=DecodeOutput.of_rows(outcomes[len(prefill) :]),
                rows=sum(written),
                forward_s=0.0,
                accept_s=0.0,
                project_s=0.0,
            ),
            written=written,
            ahead=bool(self.in_flight),
            launched_at=time.perf_counter(),
        )
        self.flights.append(flight)
        self.in_flight.append(flight)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return flight

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Tell a round's outcome; rounds end in order."""
        assert isinstance(flight, FakeFlight)
        assert self.in_flight.popleft() is flight
        if self.before_collect is not None:
            self.before_collect(flight)
        for row, count in zip((*flight.prefill, *flight.verify), flight.written, strict=True):
            if row.session.phase is not ENDED:
                kv = row.session.kv
                kv.begin(torch.zeros(count, dtype=torch.int64))
                kv.commit(range(count))
        return flight.outcome

    def _prefill(self, chunk: PrefillRow) -> RowOutput:
        session, prefix = chunk.session, self.prefixes[chunk.session.ticket]
        known = session.tokens[: session.length].tolist()
        prefix += known[len(prefix) : len(prefix) + chunk.num_tokens]
        assert len(prefix) <= self._capacities[session.ticket]
        if session.emitted:
            # What was emitted is run again, but for the root: no token is sampled behind it.
            assert not chunk.last and len(prefix) < len(known)
            if len(prefix) == len(known) - 1:
                prefix.append(known[-1])
        else:
            assert chunk.last == (len(prefix) == len(known))
        tokens = self._emit(session, 0) if chunk.last else ()
        return RowOutput(tokens, features=self._features(session, chunk.num_tokens))

    def _verify(self, row: VerifyRow) -> RowOutput:
        session = row.session
        before = len(self.prefixes[session.ticket])
        if row.draft is not None:
            assert session.spec.drafter_id is not None
            tokens = self._emit(session, self._standing(row))
            drafted = 0
        else:
            # An in-process draft is as long as ever; how much of it stands changes from round to
            # round.
            drafted = self.in_process_draft_length if row.in_process_depth else 0
            if drafted and self.draft_s:
                time.sleep(self.draft_s)
            tokens = self._emit(session, before % (row.in_process_depth + 1))
        written = before + max(drafted, row.nodes, len(tokens) - 1)
        assert written <= self._capacities[session.ticket] <= session.kv.capacity
        features = self._features(session, len(tokens))
        return RowOutput(tokens, features=features, draft_nodes=drafted)

    def _standing(self, row: VerifyRow) -> int:
        """How many tokens of a proposed chain are what the target emits."""
        assert row.draft is not None
        prefix = list(self.prefixes[row.session.ticket])
        for count, token in enumerate(row.draft.tree.tokens.tolist()):
            if token != self._next_token(row.session, prefix):
                return count
            prefix.append(token)
        return len(row.draft.tree)

    def _features(self, session: Session, count: int) -> np.ndarray | None:
        return np.zeros((count, 2), dtype=np.float32) if session.keeps_features else None

    def _emit(self, session: Session, accepted: int) -> tuple[int, ...]:
        prefix = self.prefixes[session.ticket]
        tokens: list[int] = []
        for _ in range(accepted + 1):
            tokens.append(self._next_token(session, prefix))
            prefix.append(tokens[-1])
        return tuple(tokens)

    def _next_token(self, session: Session, prefix: list[int]) -> int:
        spec = session.spec
        output = prefix[spec.prompt_len :]
        banned = spec.stop_token_ids if len(output) < spec.min_new_tokens else ()
        row = AcceptRow(
            logits_start=0,
            sampling=spec.sampling,
            position=len(prefix),
            prompt_ids=np.array(prefix[: spec.prompt_len], dtype=np.int32),
            output_ids=np.array(output, dtype=np.int32),
            banned_now=banned,
        )
        return accept_drafts(torch.from_numpy(self.target.logits(prefix)[None]), [row])[0].tokens[0]
