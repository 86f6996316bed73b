"""Decides whether sessions use the in-process drafter, and in which draft shape, with one decision
for all of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.draft_shape_controller import DraftShapeController, DraftShapeTimes
from outrider.speculation.in_process_controller import InProcessDraftController
from outrider_verifier.model_runner.results import PlainRows, RowResult
from outrider_verifier.planner.load_stats import LoadStats, RoundSample, prefill_weight
from outrider_verifier.planner.workload_stats import SpeculationState, WorkloadClass

MAX_KINDS: Final = 256
"""Kinds that are remembered; the oldest one without sessions is forgotten."""
HOST_TIME_WEIGHT: Final = 0.05
"""Weight of one round in the mean of what the host adds to rounds."""
SHAPE_ROUNDS: Final = 8
"""Rounds after which the draft shape is looked at again, or when the load has changed."""

DraftShapes = Callable[[int], Sequence[DraftShapeTimes]]
"""The draft shapes that a round of so many sessions may have, the usual one first."""


InProcessRow = tuple[SpeculationState | None, int, int]
"""A row that verified an in-process draft: what the planner keeps of its session, tokens emitted,
nodes of the draft."""


def in_process_rows(apart: Sequence[RowResult], alike: PlainRows) -> list[InProcessRow]:
    """Those of a round's rows that verified in-process drafts, and nothing else."""
    own = [
        (row.session.speculation_state, len(row.tokens), row.result.draft_nodes)
        for row in apart
        if row.result.draft_nodes and not row.nodes
    ]
    if any(alike.draft_nodes):
        columns = zip(alike.sessions, alike.counts, alike.draft_nodes, strict=True)
        own += [
            (session.speculation_state, count, drafted)
            for session, count, drafted in columns
            if drafted
        ]
    return own


class InProcessDraftPlanner:
    """Measured gain of in-process drafts by workload class, and the resulting decision.

    Classes are judged apart while they are served alone, so that greedy sessions do not suffer from
    results at high temperatures. While several are served, their common rounds are judged, and if
    any of them is to decode plainly, all do.
    """

    def __init__(self, loads: LoadStats, draft_shapes: DraftShapes) -> None:
        self._loads, self._draft_shapes = loads, draft_shapes
        self._shape = DraftShapeController()
        self.num_nodes = 0
        """Nodes of a row of the next rounds, the root included: the draft shape; 0: whatever it
        is."""
        self._host_s = 0.0
        """What rounds took beyond the device's time, of late."""
        self._looked_at = (-1, 0)
        """The load at which the shape was chosen, and rounds since."""
        self._drafts: dict[WorkloadClass | None, InProcessDraftController] = {}
        """None: of rounds with sessions of several kinds."""
        self._sessions: Counter[WorkloadClass] = Counter()

    def add_session(self, kind: WorkloadClass) -> None:
        """A session of this kind begins."""
        self._sessions[kind] += 1
        if kind in self._drafts:
            return
        idle = [old for old in self._drafts if old is not None and old not in self._sessions]
        if len(self._drafts) >= MAX_KINDS and idle:
            del self._drafts[idle[0]]
        self._drafts[kind] = InProcessDraftController()

    def remove_session(self, kind: WorkloadClass) -> None:
        """A session that was followed is over."""
        self._sessions[kind] -= 1
        if self._sessions[kind] <= 0:
            del self._sessions[kind]

    def is_plain(self, now: float) -> bool:
        """Whether the sessions that are being followed are to decode plainly.

        For good, so a load has to last before it decides. At a lower one many sessions may have
        left at once, to be followed by others: of these none would have drafts, or of those none be
        without, and rows without drafts wait for those with them. At a higher one more may come, to
        where drafts win.
        """
        loads = self._loads
        load = loads.load if loads.is_load_steady else loads.peak
        return any(
            own.choose_mode(load, now) is DecodingMode.PLAIN
            and (loads.is_load_steady or not own.is_active_above(load, now))
            for _, own in self._concerned()
        )

    def choose_shape(self) -> None:
        """Before a round: see whether another draft shape is faster at the load of now."""
        load, rounds = self._looked_at
        if load == self._loads.load and rounds < SHAPE_ROUNDS:
            self._looked_at = load, rounds + 1
            return
        self._looked_at = self._loads.load, 0
        shapes = self._draft_shapes(self._loads.sessions)
        self.num_nodes = self._shape.choose_shape(shapes, self._host_s)

    def observe_rows(self, rows: Sequence[InProcessRow], ran: RoundSample, now: float) -> None:
        """`rows`, at least one, verified in-process drafts in a round."""
        loads, count, chunks = self._loads, len(rows), ran.chunks
        emitted = [tokens for _, tokens, _ in rows]
        num_nodes = 1 + max([nodes for _, _, nodes in rows])
        squares = sum([n * n for n in emitted])
        self._shape.observe_round(num_nodes, count, sum(emitted), squares)
        alone = count == ran.rows
        # Where others have no drafts, too, it is asked what all would get if they had.
        judged = count if alone else max(count, loads.sessions)
        plain_s, own_s = loads.times(judged, own=False), loads.times(judged, own=True)
        if not plain_s or not own_s:
            return
        took_s, host_s = loads.times(count, own=True, chunks=chunks), None
        if alone and took_s and loads.is_representative(count):
            host_s = ran.seconds - loads.session_open_s(ran) - took_s
            self._host_s += HOST_TIME_WEIGHT * (max(0.0, host_s) - self._host_s)
        # There are few, and a name is told apart faster than a kind.
        known = {id(pace.workload): pace.workload for pace, _, _ in rows if pace is not None}
        workload_classes = {each.workload_class for each in known.values()}
        drafts = self._drafts.setdefault(
            workload_classes.pop() if len(workload_classes) == 1 else None,
            InProcessDraftController(),
        )
        weight = prefill_weight(chunks)
        drafts.observe_round(
            count, sum(emitted), squares, load=loads.load, host_s=host_s, weight=weight
        )
        nodes = max([each.workload_class.draft_tokens for each in known.values()], default=1)
        seen_s, seen_error = loads.measured_plain_round(judged)
        drafts.evaluate(
            loads.load,
            plain_s,
            own_s,
            now,
            nodes=nodes,
            seen_s=seen_s,
            seen_error=seen_error,
            lasting=loads.is_load_steady,
        )

    def summaries(self, now: float) -> Iterator[tuple[str, DecodingMode, float]]:
        """Of each kind being served: its name, what it is to do, and what drafts gain."""
        for kind, own in self._concerned():
            name = "own drafts of several kinds" if kind is None else f"own drafts, {kind}"
            yield name, own.choose_mode(self._loads.load, now), own.gain

    def _concerned(self) -> Iterator[tuple[WorkloadClass | None, InProcessDraftController]]:
        """The verdicts that concern the sessions of now."""
        for kind, own in list(self._drafts.items()):
            if kind in self._sessions or (kind is None and len(self._sessions) > 1):
                yield kind, own
