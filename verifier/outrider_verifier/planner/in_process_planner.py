"""Decides whether sessions use in-process drafts, and in which shape. Pure.

All these sessions have the same shape, because a round with several shapes would read the weights
several times. If a session's drafts are dropped, it decodes without drafts until it ends, because
its draft KV is no longer extended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from outrider.spec.decoding_mode import DecodingModeReason
from outrider.spec.speculation_summary import IN_PROCESS_DRAFTS
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
"""Minimum share of the running sessions that a round must contain for its time to count as a
measurement at the present load."""
SHAPE_ROUNDS: Final = 8
"""Maximum number of rounds between two choices of the shape. The shape is also chosen when the load
changes."""

DraftShapes = Callable[[int], Sequence[DraftShapeTimes]]
"""Returns the draft shapes available for a round of a given number of sessions, the default shape
first."""


def in_process_rows(apart: Sequence[RowResult], alike: PlainRows) -> tuple[list[int], int]:
    """Return the number of emitted tokens of each row that verified an in-process draft, and the
    maximum number of draft nodes of these rows (0 if there are none). `apart` and `alike` are the
    rows of one round: single results, and those of `PlainRows`."""
    drafted = [row for row in apart if row.result.draft_nodes and not row.nodes]
    counts = [len(row.tokens) for row in drafted]
    nodes = max([row.result.draft_nodes for row in drafted], default=0)
    if any(alike.draft_nodes):
        columns = zip(alike.counts, alike.draft_nodes, strict=True)
        counts += [tokens for tokens, of_row in columns if of_row]
        nodes = max(nodes, *alike.draft_nodes)
    return counts, nodes


class InProcessPlanner:
    """Chooses the shape of in-process drafts for each workload class and load.

    If all running sessions have the same class, their rounds update the statistics of this class
    only. This keeps, for example, sessions at high temperatures from influencing the choice for
    greedy ones. If the running sessions have several classes, their rounds update one common set of
    statistics.
    """

    def __init__(self, loads: LoadStats, times: RoundCostModel, draft_shapes: DraftShapes) -> None:
        self._loads, self._times, self._draft_shapes = loads, times, draft_shapes
        self._sessions: Counter[WorkloadClass] = Counter()
        self._controllers: dict[WorkloadClass | None, SpeculationController] = {}
        """Speculation controllers by workload class. The key None is used while sessions of several
        classes run."""
        self._plain_sessions = 0
        """Number of running sessions whose drafts were dropped."""
        self._looked_at = (-1, 0)
        """Pair of the load for which the shape was last chosen and the number of rounds since then.
        A load of -1 lets the next round choose again."""
        self._shape: CandidateShape | None = None
        self._tables: dict[int, DeviceTimes] = {}
        """Device times of the shapes, by number of sessions in a round. They are cached here,
        because the runner measures them only once."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of each row in the next round, including the root; 0 if the runner
        chooses."""
        return 0 if self._shape is None or self._shape == OFF else 1 + self._shape.nodes

    @property
    def num_controllers(self) -> int:
        """Number of speculation controllers that are stored."""
        return len(self._controllers)

    def add_session(self, workload_class: WorkloadClass) -> None:
        """Add a session with in-process drafts."""
        self._sessions[workload_class] += 1
        self._looked_at = (-1, 0)

    def remove_session(self, workload_class: WorkloadClass, *, is_plain: bool) -> None:
        """Remove a session that ended. `is_plain` is whether its drafts were dropped before."""
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
        """Whether plain decoding was chosen for the running sessions."""
        return self._shape == OFF

    def choose_shape(self) -> bool:
        """Choose the draft shape for the next round. Return True if the choice has changed from
        drafts to plain decoding."""
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
        """Record a finished round. `counts` holds the number of tokens of each row that verified an
        in-process draft, and `nodes` is the number of draft nodes of such a row. `rows` is the
        number of sessions that decoded in the round. `seconds` is its time without the part that
        prompts caused, and `weight` is the weight of this time."""
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
        """Return the reason for the present draft shape."""
        controller = self._controllers.get(self._key)
        if controller is None:
            return DecodingModeReason.MEASURING
        return controller.reason(self._loads.load)

    def summaries(self) -> Iterator[str]:
        """Yield the draft shape of the running workload classes and its gain, as a text of
        `SpeculationChoice`. Yields nothing if no session runs."""
        if not self._sessions or self._shape is None:
            return
        names = list(self._sessions)
        name = str(names[0]) if len(names) == 1 else f"{len(names)} classes"
        device_s = self._device_s(self._loads.sessions)
        controller = self._controllers.get(self._key)
        gain = math.nan if controller is None else controller.gain(self._loads.load, device_s)
        yield str(self._shape.as_choice(f"{IN_PROCESS_DRAFTS}, {name}", self.reason(), gain))

    @property
    def _key(self) -> WorkloadClass | None:
        """Workload class of all running sessions; None if there are several classes or no
        sessions."""
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
        """Return the device times, by draft shape, of a round of `rows` sessions. The default shape
        is first, and `OFF` (plain decoding) is last."""
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
