"""Registry of workload classes and their statistics. Pure; engine thread only but where noted."""

from __future__ import annotations

from outrider.ids import DrafterId
from outrider.speculation.look_ahead_controller import LookAheadController
from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.planner.in_process_planner import MAX_KINDS
from outrider_verifier.planner.load_stats import LoadStats
from outrider_verifier.planner.workload_stats import WorkloadClass, WorkloadStats, start_controller


class WorkloadRegistry(dict[WorkloadClass, WorkloadStats]):
    """Statistics by workload class, bounded in number.

    The oldest class without sessions is forgotten first; classes with sessions are never forgotten.
    """

    def __init__(self, *, automatic: bool, begins_ahead: bool) -> None:
        """`automatic`: False where plans are carried out as they are. `begins_ahead`: whether
        sessions that may look ahead begin so."""
        super().__init__()
        self._automatic, self._begins_ahead = automatic, begins_ahead

    def get_stats(self, kind: WorkloadClass) -> WorkloadStats:
        """What is known of a kind; nothing if it is new."""
        known = self.get(kind)
        if known is None:
            idle = (old for old, kept in self.items() if not kept.sessions)
            while len(self) >= MAX_KINDS and (oldest := next(idle, None)) is not None:
                del self[oldest]
                idle = (old for old, kept in self.items() if not kept.sessions)
            look = LookAheadController(first=self._begins_ahead) if kind.look_ahead else None
            known = self[kind] = WorkloadStats(kind, look)
            # Where nothing is decided, plans say how drafts are made.
            known.is_looking_ahead = kind.look_ahead and not self._automatic
        return known

    def get_controller(self, known: WorkloadStats, loads: LoadStats) -> SpeculationController:
        """That of a kind at the load of now."""
        controller = known.controllers.get(loads.load)
        if controller is None or not controller.is_decided:
            controller = start_controller(known, self.values(), loads.load)
            controller.expected_plain_s = loads.plain_round_s
            known.controllers[loads.load] = controller
        return controller

    def reset_drafter(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        for kind, known in self.items():
            if kind.drafter_id == drafter_id:
                known.reset_drafter()

    def slowest_response_s(self) -> float:
        """From a round's end to the proposals for what it emitted, of the slowest drafts in use;
        what was drafted ahead does not count. 0 while unknown."""
        served = (known.arrival.mean_s for known in self.values() if known.sessions)
        return max(served, default=0.0)

    def drafter_response_s(self, drafter_id: DrafterId) -> float:
        """The same of one drafter, as it was last if none are in use; any thread may ask."""
        workload_classes = [
            known for known in list(self.values()) if known.workload_class.drafter_id == drafter_id
        ]
        used = [known for known in workload_classes if known.sessions]
        return max((known.arrival.mean_s for known in used or workload_classes), default=0.0)
