"""What is known of kinds of sessions, by kind; engine thread only but where noted (pure)."""

from __future__ import annotations

from outrider.ids import DrafterId
from outrider.speculation.look_ahead_controller import LookAhead
from outrider.speculation.speculation_controller import Contest
from outrider_verifier.planner.in_process_planner import MAX_KINDS
from outrider_verifier.planner.load_stats import Loads
from outrider_verifier.planner.workload_stats import Kind, Known, begun_contest


class Kinds(dict[Kind, Known]):
    """At most so many, as far as no session needs more: the oldest one without any is forgotten."""

    def __init__(self, *, automatic: bool, begins_ahead: bool) -> None:
        """`automatic`: False where plans are carried out as they are. `begins_ahead`: whether
        sessions that may look ahead begin so."""
        super().__init__()
        self._automatic, self._begins_ahead = automatic, begins_ahead

    def of(self, kind: Kind) -> Known:
        """What is known of a kind; nothing if it is new."""
        known = self.get(kind)
        if known is None:
            idle = (old for old, kept in self.items() if not kept.sessions)
            while len(self) >= MAX_KINDS and (oldest := next(idle, None)) is not None:
                del self[oldest]
                idle = (old for old, kept in self.items() if not kept.sessions)
            look = LookAhead(first=self._begins_ahead) if kind.look_ahead else None
            known = self[kind] = Known(kind, look)
            # Where nothing is decided, plans say how drafts are made.
            known.ahead = kind.look_ahead and not self._automatic
        return known

    def contest(self, known: Known, loads: Loads) -> Contest:
        """That of a kind at the load of now."""
        contest = known.contests.get(loads.load)
        if contest is None or not contest.decided:
            contest = begun_contest(known, self.values(), loads.load)
            contest.expected_s = loads.plain_s
            known.contests[loads.load] = contest
        return contest

    def attached(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        for kind, known in self.items():
            if kind.drafter_id == drafter_id:
                known.attached()

    def answer_s(self) -> float:
        """From a round's end to the proposals for what it emitted, of the slowest drafts in use;
        what was drafted ahead does not count. 0 while unknown."""
        served = (known.arrival.mean_s for known in self.values() if known.sessions)
        return max(served, default=0.0)

    def answer_s_of(self, drafter_id: DrafterId) -> float:
        """The same of one drafter, as it was last if none are in use; any thread may ask."""
        kinds = [known for known in list(self.values()) if known.kind.drafter_id == drafter_id]
        used = [known for known in kinds if known.sessions]
        return max((known.arrival.mean_s for known in used or kinds), default=0.0)
