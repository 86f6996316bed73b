"""Decides the draft shape of all sessions with in-process drafts, and whether they have any. Pure.

All these sessions share one decision, because the weights would be read several times in a round of
several shapes. A session whose drafts were dropped decodes plainly to its end, since its draft KV
is no longer extended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from outrider.spec.decoding_mode import DecodingModeReason
from outrider_verifier.model_runner.interface import DraftShapeTimes
from outrider_verifier.model_runner.results import PlainRows, RowResult
from outrider_verifier.planner.speculation_controller import (
    OFF,
    CandidateShape,
    DeviceTimes,
    RoundObservation,
    SpeculationController,
)
from outrider_verifier.planner.statistics import LoadStats, RoundCostModel
from outrider_verifier.planner.workload import MAX_WORKLOAD_CLASSES, WorkloadClass

MIN_BATCH_SHARE: Final = 0.75
"""Minimum share of the running sessions that a round must contain to count as a measurement of the
load."""
SHAPE_ROUNDS: Final = 8
"""Number of rounds after which the shape is chosen again; a change of the load has the same
effect."""

DraftShapes = Callable[[int], Sequence[DraftShapeTimes]]
"""Returns the draft shapes available for a round of a given number of sessions, the default shape
first."""


def in_process_rows(apart: Sequence[RowResult], alike: PlainRows) -> tuple[list[int], int]:
    """Return the number of tokens of each row that verified an in-process draft, and the largest
    number of draft nodes of such a row (0 if there are none)."""
    drafted = [row for row in apart if row.result.draft_nodes and not row.nodes]
    counts = [len(row.tokens) for row in drafted]
    nodes = max([row.result.draft_nodes for row in drafted], default=0)
    if any(alike.draft_nodes):
        columns = zip(alike.counts, alike.draft_nodes, strict=True)
        counts += [tokens for tokens, of_row in columns if of_row]
        nodes = max(nodes, *alike.draft_nodes)
    return counts, nodes


class InProcessPlanner:
    """Chooses the shape of in-process drafts by workload class and load.

    If only one class is running, its rounds update the statistics of that class, so that greedy
    sessions do not suffer from sessions at high temperatures. If several are running, their rounds
    update one common set of statistics.
    """

    def __init__(self, loads: LoadStats, times: RoundCostModel, draft_shapes: DraftShapes) -> None:
        self._loads, self._times, self._draft_shapes = loads, times, draft_shapes
        self._sessions: Counter[WorkloadClass] = Counter()
        self._controllers: dict[WorkloadClass | None, SpeculationController] = {}
        """Controllers by workload class; the key None is for rounds with sessions of several
        classes."""
        self._plain_sessions = 0
        """Number of sessions whose drafts were dropped."""
        self._looked_at = (-1, 0)
        """Load for which the shape was last chosen, and the number of rounds since then."""
        self._shape: CandidateShape | None = None
        self._tables: dict[int, DeviceTimes] = {}
        """Device times by number of sessions in a round; the runner measures them once."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a row in the next round, including the root; 0 leaves the choice to
        the runner."""
        return 0 if self._shape is None or self._shape == OFF else 1 + self._shape.nodes

    @property
    def num_controllers(self) -> int:
        """Number of stored controllers."""
        return len(self._controllers)

    def add_session(self, workload_class: WorkloadClass) -> None:
        """Add a session with in-process drafts."""
        self._sessions[workload_class] += 1
        self._looked_at = (-1, 0)

    def remove_session(self, workload_class: WorkloadClass, *, is_plain: bool) -> None:
        """Remove a session that ended. `is_plain` is whether its drafts had been dropped."""
        self._sessions[workload_class] -= 1
        self._plain_sessions -= is_plain
        self._looked_at = (-1, 0)
        if self._sessions[workload_class] <= 0:
            del self._sessions[workload_class]

    def record_dropped_drafts(self) -> None:
        """Record that the drafts of a session were dropped."""
        self._plain_sessions += 1

    @property
    def is_plain(self) -> bool:
        """Whether the present sessions should decode plainly."""
        return self._shape == OFF

    def choose_shape(self) -> bool:
        """Choose the shape for the next round. Return True if sessions that had drafts until now
        should decode plainly."""
        load, rounds = self._looked_at
        if not self._sessions or (load == self._loads.load and rounds < SHAPE_ROUNDS):
            self._looked_at = load, rounds + 1
            return False
        self._looked_at = self._loads.load, 0
        device_s = self._device_s(self._loads.sessions)
        shape = self._controller().shape(self._loads.load, device_s)
        has_drafts = self._shape is not None and self._shape != OFF
        if shape == OFF and has_drafts and not self._loads.is_steady:
            # Dropping drafts is final, and drafts may be faster at the next load.
            return False
        before, self._shape = self._shape, shape
        return self.is_plain and before != shape

    def observe_rows(
        self, counts: Sequence[int], nodes: int, *, rows: int, seconds: float, weight: float
    ) -> None:
        """Record a finished round. `counts` are the tokens of each row that verified an in-process
        draft, `nodes` the draft nodes of such a row, `rows` the number of sessions that decoded in
        the round, and `seconds` its time without the part caused by prompts."""
        sessions = sum(self._sessions.values())
        if not sessions or not (counts or (rows and self._plain_sessions >= sessions)):
            return
        is_alone = len(counts) in (0, rows)
        is_settled = is_alone and rows >= MIN_BATCH_SHARE * self._loads.sessions
        device_s = self._device_s(rows)
        shape = OFF
        if counts:
            shape = next((each for each in device_s if each.nodes == nodes), OFF)
            if shape == OFF:
                return
        else:
            counts = (1,) * rows
        seen = RoundObservation(
            len(counts),
            sum(counts),
            sum([count * count for count in counts]),
            seconds * len(counts),
            max(len(counts), self._loads.sessions) if is_settled else rows,
            is_settled,
            weight,
        )
        controller, load = self._controller(), self._loads.load
        controller.observe_round(load, shape, seen, device_s)
        if controller.shape(load, self._device_s(self._loads.sessions)) != self._shape:
            self._looked_at = (-1, 0)

    def reason(self) -> DecodingModeReason:
        """Return the reason for the present shape."""
        controller = self._controllers.get(self._key)
        if controller is None:
            return DecodingModeReason.MEASURING
        return controller.reason(self._loads.load)

    def summaries(self) -> Iterator[str]:
        """Yield a summary of the served classes, their shape and its gain, in ASCII."""
        if not self._sessions or self._shape is None:
            return
        names = list(self._sessions)
        name = str(names[0]) if len(names) == 1 else f"{len(names)} classes"
        device_s = self._device_s(self._loads.sessions)
        controller = self._controllers.get(self._key)
        gain = math.nan if controller is None else controller.gain(self._loads.load, device_s)
        yield f"in-process drafts, {name}: {self._shape} ({self.reason()}{format_gain(gain)})"

    @property
    def _key(self) -> WorkloadClass | None:
        """The class that is served; None if there are several or none."""
        served = list(self._sessions)
        return served[0] if len(served) == 1 else None

    def _controller(self) -> SpeculationController:
        key = self._key
        controller = self._controllers.get(key)
        if controller is None:
            idle = [each for each in self._controllers if each not in self._sessions]
            if len(self._controllers) >= MAX_WORKLOAD_CLASSES and idle:
                del self._controllers[idle[0]]
            controller = self._controllers[key] = SpeculationController(can_resume=False)
        return controller

    def _device_s(self, rows: int) -> DeviceTimes:
        """Return the device times by shape for a round of `rows` sessions, `OFF` last."""
        device_s = self._tables.get(rows)
        if device_s is None:
            shapes = self._draft_shapes(rows)
            device_s = {
                CandidateShape(each.num_nodes - 1, each.is_tree): each.seconds for each in shapes
            }
            plain_s = self._times(rows, own=False)
            device_s[OFF] = math.nan if plain_s is None else plain_s
            self._tables[rows] = device_s
        return device_s


def format_gain(gain: float) -> str:
    """Return a gain formatted for summaries; "" if it is unknown (nan)."""
    return "" if math.isnan(gain) else f", {gain:.2f}x of plain"
