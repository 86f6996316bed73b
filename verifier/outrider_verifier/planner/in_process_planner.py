"""Decides the draft shape of all sessions with in-process drafts, and whether they have any. Pure.

All of them share one decision, because rounds of several shapes read the weights several times. A
session whose drafts were dropped decodes plainly to its end: the head's KV ends there.
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
"""Share of the running sessions without which a round tells nothing about the load."""
SHAPE_ROUNDS: Final = 8
"""Rounds after which the shape is looked up again, or when the load has changed."""

DraftShapes = Callable[[int], Sequence[DraftShapeTimes]]
"""The shapes that in-process drafts of a round of so many sessions may have, the usual one
first."""


def in_process_rows(apart: Sequence[RowResult], alike: PlainRows) -> tuple[list[int], int]:
    """Tokens of each of a round's rows that verified an in-process draft, and the draft nodes of
    each (0: there is none)."""
    drafted = [row for row in apart if row.result.draft_nodes and not row.nodes]
    counts = [len(row.tokens) for row in drafted]
    nodes = max([row.result.draft_nodes for row in drafted], default=0)
    if any(alike.draft_nodes):
        columns = zip(alike.counts, alike.draft_nodes, strict=True)
        counts += [tokens for tokens, of_row in columns if of_row]
        nodes = max(nodes, *alike.draft_nodes)
    return counts, nodes


class InProcessPlanner:
    """The shape of in-process drafts, by workload class and load.

    If only one class is running, its rounds update the statistics of that class, so that greedy
    sessions do not suffer from sessions at high temperatures. If several are running, their rounds
    update one common set of statistics.
    """

    def __init__(self, loads: LoadStats, times: RoundCostModel, draft_shapes: DraftShapes) -> None:
        self._loads, self._times, self._draft_shapes = loads, times, draft_shapes
        self._sessions: Counter[WorkloadClass] = Counter()
        self._controllers: dict[WorkloadClass | None, SpeculationController] = {}
        """None: of rounds with sessions of several classes."""
        self._plain_sessions = 0
        """Sessions whose drafts were dropped."""
        self._looked_at = (-1, 0)
        """The load at which the shape was looked up, and rounds since."""
        self._shape: CandidateShape | None = None
        self._tables: dict[int, DeviceTimes] = {}
        """Device times by sessions of a round; the runner measures them once."""

    @property
    def num_nodes(self) -> int:
        """Nodes of a row of the next round, the root included; 0: as the runner has it."""
        return 0 if self._shape is None or self._shape == OFF else 1 + self._shape.nodes

    @property
    def num_controllers(self) -> int:
        """Controllers that are remembered."""
        return len(self._controllers)

    def add_session(self, workload_class: WorkloadClass) -> None:
        """A session with in-process drafts begins."""
        self._sessions[workload_class] += 1
        self._looked_at = (-1, 0)

    def remove_session(self, workload_class: WorkloadClass, *, is_plain: bool) -> None:
        """A session ended; `is_plain`: its drafts had been dropped."""
        self._sessions[workload_class] -= 1
        self._plain_sessions -= is_plain
        self._looked_at = (-1, 0)
        if self._sessions[workload_class] <= 0:
            del self._sessions[workload_class]

    def record_dropped_drafts(self) -> None:
        """A session decodes plainly from now on."""
        self._plain_sessions += 1

    @property
    def is_plain(self) -> bool:
        """Whether the sessions of now should decode plainly."""
        return self._shape == OFF

    def choose_shape(self) -> bool:
        """Before a round: look the shape up. Returns whether sessions should decode plainly that
        had drafts until now."""
        load, rounds = self._looked_at
        if not self._sessions or (load == self._loads.load and rounds < SHAPE_ROUNDS):
            self._looked_at = load, rounds + 1
            return False
        self._looked_at = self._loads.load, 0
        device_s = self._device_s(self._loads.sessions)
        shape = self._controller().shape(self._loads.load, device_s)
        has_drafts = self._shape is not None and self._shape != OFF
        if shape == OFF and has_drafts and not self._loads.is_steady:
            # Dropping drafts is final, and at the next load they may win.
            return False
        before, self._shape = self._shape, shape
        return self.is_plain and before != shape

    def observe_rows(
        self, counts: Sequence[int], nodes: int, *, rows: int, seconds: float, weight: float
    ) -> None:
        """A round ended. `counts`: tokens of the rows that verified in-process drafts, of `nodes`
        draft nodes each; `rows`: sessions that decoded in it; `seconds`: its time without what
        prompts added."""
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
        """Why the shape in force is in force."""
        controller = self._controllers.get(self._key)
        if controller is None:
            return DecodingModeReason.MEASURING
        return controller.reason(self._loads.load)

    def summaries(self) -> Iterator[str]:
        """The classes that are served, their shape and its gain; ASCII."""
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
        """The class that is served; None: there are several."""
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
        """The shapes that a round of so many sessions may have, `OFF` last."""
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
    """A gain as summaries say it; "" while it is not known."""
    return "" if math.isnan(gain) else f", {gain:.2f}x of plain"
