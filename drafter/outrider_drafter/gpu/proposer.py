"""GpuProposer: proposer whose drafts are single GPU launches, for an EAGLE head or a small model.

A batch of sessions costs one upload, one graph (catch-up, all levels, all choices of nodes) and one
download. The host waits for the device once. With draft distributions it waits twice, because their
size is known only after the first wait. Look-ahead needs one such launch to score proposals and one
for all outcome drafts of a shape. Drafts that the graphs do not support (trees under the rejection
rule, sessions with token limits) are made by a proposer on the host with the same weights.

Letters in shapes: B rows of a bucket; L layers; G key/value heads; S rows; d head dimension. A
*device slot* is the index of a session in the tensors on the device.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from outrider import timeline
from outrider.engine.device.drafting.draft_row_state import DraftSampling
from outrider.engine.device.graphs.kernel_compilation import compile_kernels
from outrider.engine.device.graphs.shapes import bucket_for
from outrider.engine.device.transfer.buffers import DownloadBuffer
from outrider.spec.plan import DraftMethod
from outrider_drafter.gpu.batch import DraftBatch, LaunchSessions, ReadyRows, update_penalty_counts
from outrider_drafter.gpu.draft_launcher import DraftLauncher, LaunchOutput
from outrider_drafter.gpu.draft_model import GpuDraftModel
from outrider_drafter.gpu.draft_results import chain_lengths
from outrider_drafter.gpu.grammar_masks import draft_starts
from outrider_drafter.gpu.look_ahead import GpuLookAhead
from outrider_drafter.gpu.outcome_drafting import SCRATCH_BLOCKS
from outrider_drafter.gpu.outcome_scoring import NUM_SWEEPS
from outrider_drafter.gpu.session_slots import GpuProposerBase
from outrider_drafter.gpu.shapes import (
    DraftTreeShape,
    ProposalShape,
    batch_sizes,
    draft_shapes,
    grammar_shape,
    is_supported,
    max_sessions,
    scoring_shapes,
)
from outrider_drafter.proposers.interface import (
    LookAheadProposer,
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    SessionDrafts,
    empty_scores,
)
from outrider_drafter.state.session import FollowedSession, SessionKey

logger = logging.getLogger(__name__)


class GpuProposer(GpuProposerBase):
    """Proposer that drafts with captured CUDA graphs. On a CPU it runs the same code without
    graphs."""

    def __init__(
        self,
        method: DraftMethod,
        drafter: GpuDraftModel,
        host: Callable[[], LookAheadProposer],
        *,
        max_rows: int,
        max_context: int,
        max_sessions: int,
        dtype: torch.dtype,
        device: torch.device | str,
        cuda_graphs: bool,
        bounded: bool,
        look_ahead: bool = True,
        sweeps: int = NUM_SWEEPS,
    ) -> None:
        """Create a proposer without sessions.

        `host`: makes the host proposer for drafts that the graphs do not support; called when first
        needed. `max_rows`: maximum number of KV rows of all sessions on the device. `max_context`:
        maximum number of draft positions of a session; 0 uses the draft model's limit. `bounded`:
        whether a draft gets the captured shape that fits its plan best, instead of exactly the
        shape of the plan. `look_ahead`: whether look-ahead is supported; otherwise nothing is
        scored. `sweeps`: number of passes over a proposal's nodes during scoring, see
        `DraftForward.run_proposal`.
        """
        super().__init__(
            drafter,
            max_rows=max_rows,
            max_context=max_context,
            max_sessions=max_sessions,
            rows_with_draft=drafter.buckets.rows[-1],
            scratch_blocks=SCRATCH_BLOCKS if look_ahead else 0,
            dtype=dtype,
            device=device,
            cuda_graphs=cuda_graphs,
            bounded=bounded,
        )
        self.method = method
        self._batch = DraftBatch(
            self.kv_rows,
            self._program.forward,
            dtype,
            self._device,
            max_rows=drafter.buckets.rows[-1],
        )
        self._landing = DownloadBuffer(self._device)
        self._grower = DraftLauncher(self._program, self.kv_rows, self._landing)
        self._ahead: GpuLookAhead | None = None
        if look_ahead:
            self._ahead = GpuLookAhead(
                self._program,
                self.kv_rows,
                self._grower,
                self.graphs,
                self._landing,
                dtype=dtype,
                max_context=self._max_context,
                bounded=bounded,
                sweeps=sweeps,
                path_rows=self._buckets.path_rows,
            )
        self._last: tuple[Sequence[FollowedSession], DraftTreeShape, LaunchSessions] | None = None
        """Sessions, shape and columns of the last launch if it served the whole request; None if
        there is no such launch or one of its sessions may have been removed."""
        self._on_host: set[SessionKey] = set()
        self._make_host = host
        self._host: LookAheadProposer | None = None
        self._hosted: list[int] = []
        """Indices of the proposals that were scored last on the host."""

    @property
    def used_rows(self) -> int:
        """Number of KV rows reserved on the device."""
        return self.kv_rows.used_rows

    @property
    def num_on_host(self) -> int:
        """Number of sessions whose drafts are made on the host."""
        return len(self._on_host)

    def kv(self, handle: int, connection: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a session's rows that were made from accepted
        tokens, [layers * KV heads, rows, head dimension] each, for inspection. `handle` and
        `connection`: as in `SessionKey`."""
        slot = self._known[SessionKey(connection, handle)]
        rows = int(self._seats.stable[slot])
        keys, values = self.kv_rows.copy_kv(int(self._seats.seats[slot]), rows)
        return keys.flatten(0, 1), values.flatten(0, 1)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile the kernels of all graphs to be captured, in parallel."""
        compile_kernels(self.graphs, self._device, lambda _: self._run_family())

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all graphs, so that no session waits for a capture. From then on, shapes without
        a graph are launched kernel by kernel."""
        began = time.monotonic()
        self._run_family()
        self.graphs.sealed = True
        seconds = round(time.monotonic() - began, 1)
        logger.info("drafts captured", extra={"graphs": len(self.graphs), "seconds": seconds})

    def _run_family(self) -> None:
        """Run every graph once, with padding only."""
        self._writer.warm_up()
        for shape, general in draft_shapes(self._buckets.chains):
            sizes = batch_sizes(shape, self._buckets.sessions)
            for size, num_rows in itertools.product(sizes, self._buckets.rows):
                result, _ = self._launch(shape, None, size, num_rows, general=general)
                self._landing.wait_copy(result)
        if self._ahead is not None:
            for shape, general in draft_shapes(self._buckets.chains, branches=True):
                self._ahead.warm_up_branches(shape, general=general)
            for nodes, warps in scoring_shapes():
                self._ahead.warm_up_scores(
                    nodes, self._batch, self._buckets.score_rows, warps=warps
                )

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Write the KV of all rows of these sessions whose tokens and, if the model needs them,
        features have been received."""
        hosted = [session for session in sessions if self._is_on_host(session)]
        super().catch_up([session for session in sessions if session not in hosted])
        if hosted:
            self._host_source().catch_up(hosted)

    @torch.inference_mode()
    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Write the KV of the sessions' new tokens and draft for the sessions. Sessions with the
        same draft shape share launches. New sessions and sessions with many new rows come last, so
        that they do not delay the others."""
        again = self._again(sessions)
        if again is not None:
            yield self._draft(*again)
            return
        known: list[FollowedSession] = []
        new: list[FollowedSession] = []
        hosted: list[FollowedSession] = []
        for session in sessions:
            if session.key in self._known:
                known.append(session)
            else:
                (hosted if self._is_on_host(session) else new).append(session)
        # New sessions come last, because assigning device slots takes calls of the device driver.
        for part in (known, new):
            for shape, members in self._grouped(part):
                yield from self._draft_all(shape, members, sessions)
        if hosted:
            yield from self._host_source().draft_sessions(hosted)

    def _draft_all(
        self,
        shape: DraftTreeShape,
        members: Sequence[FollowedSession],
        sessions: Sequence[FollowedSession],
    ) -> Iterator[SessionDrafts]:
        """Draft for sessions of one shape, in as many launches as needed. `sessions`: all sessions
        of the request."""
        seated = self._prepare(members, shape)
        most = max_sessions(shape)
        for first in range(0, len(seated), most):
            part = seated[first : first + most]
            alike = len(part) == len(sessions)
            chosen = LaunchSessions.of_sessions(sessions if alike else part, self._seats)
            if alike:
                self._last = (sessions, shape, chosen)
            yield self._draft(shape, self._ready(chosen))

    def _grouped(
        self, sessions: Sequence[FollowedSession]
    ) -> list[tuple[DraftTreeShape, list[FollowedSession]]]:
        """Return the sessions grouped by draft shape. Sessions with many new rows are in groups of
        their own at the end."""
        shapes: dict[DraftTreeShape, list[FollowedSession]] = {}
        for session in sessions:
            shape = self._previous_shape(session)
            if shape is None and self._follows(session):
                shape = self._new_shape(session)
            if shape is not None:
                shapes.setdefault(shape, []).append(session)
        groups: tuple[list[tuple[DraftTreeShape, list[FollowedSession]]], ...] = ([], [])
        for shape, members in shapes.items():
            slots = np.array([session.slot for session in members])
            news = self._live_rows(members[0].table, slots) + 1 - self._seats.stable[slots]
            late = news > self._rows_with_draft
            if not bool(late.any()):
                groups[0].append((shape, members))
                continue
            for those, which in zip(groups, (~late, late), strict=True):
                chosen = [members[index] for index in np.flatnonzero(which).tolist()]
                if chosen:
                    those.append((shape, chosen))
        return groups[0] + groups[1]

    def _again(
        self, sessions: Sequence[FollowedSession]
    ) -> tuple[DraftTreeShape, ReadyRows] | None:
        """Return the shape and rows for repeating the last launch, if the request has the same
        sessions and all of them still have KV rows and levels left for the shape. Return None
        otherwise."""
        if self._last is None or self._last[0] is not sessions:
            return None
        _, shape, members = self._last
        table, seats, slots = members.table, self._seats, members.slots
        live = self._live_rows(table, slots)
        depths = np.full(len(live), shape.depth)
        most = live + 1 + shape.rows_needed(depths)
        fit = self._can_draft(table, slots, live, depths) & (most <= seats.room[slots])
        fit &= table.draft_levels_left(slots) >= shape.depth
        fit &= live + 1 - seats.stable[slots] <= self._rows_with_draft
        return (shape, self._ready(members)) if bool(fit.all()) else None

    @torch.inference_mode()
    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Write the KV of the sessions' new tokens, then score the outcomes of the proposals.
        Proposals of the same shape share launches."""
        ahead = self._ahead
        if ahead is None:
            return empty_scores(lives)
        ahead.start_look_ahead_pass(lives)
        self._hosted = []
        groups: dict[ProposalShape, dict[int, int]] = {}
        for live, (session, _) in enumerate(lives):
            if self._is_on_host(session):
                self._hosted.append(live)
                continue
            shape = self._previous_shape(session)
            if shape is None and self._follows(session):
                shape = self._new_shape(session)
            if shape is not None:
                groups.setdefault(ahead.add_proposal(live, shape), {})[session.slot] = live
        for nodes, members in groups.items():
            sessions = [lives[live].session for live in members.values()]
            seated = self._prepare(sessions, nodes, or_shut=False)
            for first in range(0, len(seated), nodes.batch_buckets[-1]):
                part = seated[first : first + nodes.batch_buckets[-1]]
                if ahead.has_room(len(part), nodes):
                    self._score(ahead, nodes, part, [members[each.slot] for each in part])
        if self._hosted:
            theirs = self._host_source().score_proposals([lives[live] for live in self._hosted])
            ahead.store_scores(self._hosted, theirs)
        return ahead.scored()

    @torch.inference_mode()
    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Draft for outcomes of the proposals that were scored last. Outcomes with the same draft
        shape share launches. The iterator may be closed before its end."""
        if self._ahead is None:
            return
        yield from self._ahead.draft_outcomes(outcomes)
        numbers = {live: number for number, live in enumerate(self._hosted)}
        hosted = [index for index, outcome in enumerate(outcomes) if outcome.live in numbers]
        if hosted:
            theirs = [outcomes[index] for index in hosted]
            theirs = [outcome._replace(live=numbers[outcome.live]) for outcome in theirs]
            for branches in self._host_source().draft_outcomes(theirs):
                yield replace(branches, outcomes=np.array(hosted)[branches.outcomes])

    def release_session(self, session: FollowedSession) -> None:
        """Free the state of a session; idempotent."""
        self._last = None
        self._forget(session)
        if session.key in self._on_host:
            self._on_host.discard(session.key)
            self._host_source().release_session(session)

    def _is_on_host(self, session: FollowedSession) -> bool:
        """Return whether a session is drafted for on the host. A session stays where it began,
        because its KV is there."""
        if session.key in self._known:
            return False
        # With token limits few ids may be allowed, and unmasked drafts would hardly ever be valid.
        covered = session.token_limits is None and is_supported(session.sampling, session.plan)
        if session.key not in self._on_host and not covered:
            self._on_host.add(session.key)
        return session.key in self._on_host

    def _host_source(self) -> LookAheadProposer:
        if self._host is None:
            self._host = self._make_host()
        return self._host

    def _draft(self, shape: DraftTreeShape, ready: ReadyRows) -> SessionDrafts:
        members, most = ready.members, int(ready.counts.max())
        if members.has_grammar:
            shape = grammar_shape(shape)
        size = bucket_for(len(ready), batch_sizes(shape, self._buckets.sessions))
        num_rows = bucket_for(most, self._buckets.rows)
        if members.has_penalties:
            update_penalty_counts(members, self._seats.counted, self.kv_rows.warp)
        starts = draft_starts(members.sessions) if members.has_grammar else ()
        general = bool(members.needs_general_graph.any())
        if general:
            self._grower.set_masks(shape, starts, size)
        result, entries = self._launch(shape, ready, size, num_rows, general=general)
        launched = timeline.now()
        # While the device works.
        self._took(ready)
        cut = chain_lengths(
            shape, members.wanted_nodes, members.table.draft_levels_left(members.slots)
        )
        words = self._landing.wait_copy(result).numpy()
        timeline.mark_span("device", launched, len(ready), track="device")
        self._batch.release_features()
        return self._grower.read_drafts(shape, members.sessions, cut, words, entries, starts)

    def _launch(
        self,
        shape: DraftTreeShape,
        ready: ReadyRows | None,
        size: int,
        num_rows: int,
        *,
        general: bool,
    ) -> LaunchOutput:
        staged = self._batch.stage_rows(ready, size, num_rows)
        drawing = (
            DraftSampling(staged.rows.slots, staged.draft_keys) if shape.has_distribution else None
        )

        def run() -> LaunchOutput:
            staged.upload()
            return self._grower.launch_draft(shape, staged.rows, drawing, general=general)

        return self.graphs.run_graph((shape, size, num_rows, general), run)

    def _score(
        self,
        ahead: GpuLookAhead,
        nodes: ProposalShape,
        part: Sequence[FollowedSession],
        lives: Sequence[int],
    ) -> None:
        """Score the proposals with indices `lives`, which belong to the sessions `part`, in one
        launch."""
        members = LaunchSessions.of_sessions(part, self._seats)
        ready = self._ready(members)
        size = bucket_for(len(ready), nodes.batch_buckets)
        num_rows = bucket_for(int(ready.counts.max()), self._buckets.score_rows)
        if members.has_penalties:
            update_penalty_counts(members, self._seats.counted, self.kv_rows.warp)
        words = ahead.launch_scoring(
            nodes, self._batch.stage_rows(ready, size, num_rows), members, lives
        )
        # While the device works.
        self._took(ready)
        ahead.read_scores(self._landing.wait_copy(words).numpy())
        self._batch.release_features()

    def _took(self, ready: ReadyRows) -> None:
        """Mark the new rows of a launch as stable and their features as consumed."""
        members, stops = ready.members, ready.starts + ready.counts
        self._seats.stable[members.slots] = stops
        if self.feature_size:
            newest = self._batch.newest_features(ready)
            members.table.features.mark_batch_consumed(members.slots, stops, newest)

    def _give_up(self, session: FollowedSession) -> None:
        self._last = None
        super()._give_up(session)
