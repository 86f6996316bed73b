"""Workload classes (sessions that are expected to speculate alike) and their measured
statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider_verifier.planner.draft_length import (
    AcceptanceByDepth,
    ForwardTimes,
    choose_draft_length,
)
from outrider_verifier.planner.proposal_wait import ArrivalEstimate, ProposalWait
from outrider_verifier.planner.speculation_controller import (
    OFF,
    CandidateShape,
    RoundObservation,
    SpeculationController,
)
from outrider_verifier.state.session import NO_LIMIT, Session

MAX_WORKLOAD_CLASSES: Final = 256
"""Maximum number of classes with statistics; the oldest class without sessions is deleted first."""
REVIEW_ROUNDS: Final = 48
"""Number of drafted rounds of a class after which its draft length is chosen again."""
RESUME_ROUNDS: Final = 3.0
"""Number of drafted rounds of a session after its speculation resumed that are not counted as
typical, because its drafter and the other resuming sessions are not in step yet."""
CATCH_UP_WEIGHT: Final = 0.2
"""Weight of a round without a draft, as a part of `RESUME_ROUNDS`."""


class WorkloadClass(NamedTuple):
    """Properties of a session by which sessions share statistics: sessions with equal values are
    expected to speculate alike."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Sampling temperature, rounded to tenths."""
    look_ahead: bool = False
    """Whether drafts may be made ahead of their verdicts."""
    fan_out: int = 0
    has_grammar: bool = False
    """Whether the sessions have a grammar. Their rounds wait for the host, and their acceptance
    differs."""

    @classmethod
    def of_session(cls, session: Session) -> WorkloadClass:
        """Return the workload class of a session with a speculative plan."""
        plan, sampling = session.plan, session.spec.sampling
        return cls(
            drafter_id=session.spec.drafter_id,
            method=plan.method,
            draft_tokens=plan.draft_tokens,
            top_k=plan.top_k,
            rule=sampling.rule,
            temperature=round(sampling.temperature, 1),
            look_ahead=plan.look_ahead > 0,
            fan_out=plan.fan_out,
            has_grammar=session.constraint is not None,
        )

    @property
    def shape(self) -> CandidateShape:
        """Draft shape of the class if drafts are made in lock-step."""
        return CandidateShape(self.draft_tokens, is_tree=self.top_k > 1)

    @property
    def shape_ahead(self) -> CandidateShape:
        """Draft shape of the class if drafts are made ahead of their verdicts."""
        return self.shape._replace(is_ahead=True)

    def __str__(self) -> str:
        kind = "chain" if self.top_k == 1 else "tree"
        grammar = ", grammar" if self.has_grammar else ""
        sampling = f"{self.rule}, T {self.temperature}{grammar}"
        return f"{self.method} {kind} of {self.draft_tokens}, {sampling}"


@dataclass(slots=True)
class RowTally:
    """Sums over rows of one class and shape in one round; see `RoundObservation`."""

    rows: int = 0
    tokens: int = 0
    squares: int = 0
    seconds: float = 0.0

    def add_row(self, tokens: int, seconds: float) -> None:
        """Add a row that emitted `tokens` tokens, `seconds` after the session's previous round."""
        self.rows += 1
        self.tokens += tokens
        self.squares += tokens * tokens
        self.seconds += seconds

    def take(self, sessions: int, *, is_settled: bool, weight: float) -> RoundObservation:
        """Return the sums and reset them. `sessions` is the number of decoding sessions of the
        class."""
        seen = RoundObservation(
            self.rows, self.tokens, self.squares, self.seconds, sessions, is_settled, weight
        )
        self.rows = self.tokens = self.squares = 0
        self.seconds = 0.0
        return seen


@dataclass(slots=True, eq=False)
class WorkloadStats:
    """Measured statistics of a workload class that is drafted for by messages."""

    workload_class: WorkloadClass
    controller: SpeculationController
    shapes: tuple[CandidateShape, ...]
    """Draft shapes that the sessions may have, including `OFF`; the shape to start with comes
    first."""
    acceptance: AcceptanceByDepth
    arrivals: tuple[ArrivalEstimate, ArrivalEstimate] = field(
        default_factory=lambda: (ArrivalEstimate(), ArrivalEstimate())
    )
    """Delays of proposals in lock-step and with look-ahead. They are separate because with
    look-ahead the drafter may be busy with other drafts."""
    sessions: int = 0
    """Number of sessions in this class."""
    decoding: int = 0
    """Number of these sessions that decode, i.e. have been in a round; waiting and prefilling
    sessions are left out."""
    shape: CandidateShape = OFF
    """Draft shape for the sessions in the next round."""
    limits: dict[int, int] = field(default_factory=dict)
    """Number of draft tokens that are worth verifying, by load; without an entry there is no
    limit."""
    forwards: dict[int, ForwardTimes] = field(default_factory=dict)
    """Times of the target's forward pass, by load."""
    tallies: dict[tuple[CandidateShape, bool], RowTally] = field(default_factory=dict)
    """Sums of the round that is being observed, by draft shape and whether the rows are settled."""
    _rounds_since_review: int = 0
    _step_s: float = 0.0
    """Mean time from one drafted round of a session to the next, in seconds."""

    @property
    def is_plain(self) -> bool:
        """Whether the sessions should decode plainly."""
        return not self.shape.nodes

    @property
    def arrival(self) -> ArrivalEstimate:
        """Delays of proposals with the shape in force."""
        return self.arrivals[self.shape.is_ahead]

    def tally(self, shape: CandidateShape, is_settled: bool) -> RowTally:
        """Return the sums to which a row with drafts of `shape` is added."""
        tally = self.tallies.get((shape, is_settled))
        if tally is None:
            tally = self.tallies[shape, is_settled] = RowTally()
        return tally

    def shape_of(self, session: Session) -> CandidateShape:
        """Return the shape that a session has now."""
        if session.is_speculation_off:
            return OFF
        mine = self.workload_class
        return mine.shape_ahead if session.is_look_ahead_on else mine.shape

    def reset_drafter(self) -> None:
        """Discard the measurements of a drafter that was replaced."""
        self.controller = SpeculationController()
        self.arrivals = ArrivalEstimate(), ArrivalEstimate()
        self.acceptance = AcceptanceByDepth(self.workload_class.draft_tokens)
        self.limits.clear()
        self._rounds_since_review, self._step_s = 0, 0.0

    def draft_limit(self, load: int) -> int:
        """Return the number of draft tokens that are worth verifying at a load."""
        return self.limits.get(load, NO_LIMIT)

    def observe_forward(self, load: int, nodes: int, seconds: float) -> None:
        """Record the time of a forward pass, in seconds. `nodes` is the mean number of draft nodes
        of its rows."""
        self.forwards.setdefault(load, ForwardTimes()).observe_forward(nodes, seconds)

    def review_draft_length(self, load: int, step_s: float) -> bool:
        """Record a drafted round, and choose the length of chains again if that is due. Return
        whether the length has changed. `step_s` is the time from one round of a session to the
        next, in seconds."""
        self._step_s += (step_s - self._step_s) / 8.0 if self._step_s else step_s
        self._rounds_since_review += 1
        if self._rounds_since_review < REVIEW_ROUNDS or self.workload_class.top_k != 1:
            return False
        self._rounds_since_review = 0
        longest, before = self.workload_class.draft_tokens, self.draft_limit(load)
        forwards, present = self.forwards.get(load), min(before, longest)
        if forwards is None or self.shape.is_ahead:
            return False
        forward_s = forwards.estimate(present)
        length = choose_draft_length(
            self.acceptance.reach(),
            forwards.estimates,
            extra_s=max(0.0, self._step_s - forward_s) if forward_s > 0.0 else 0.0,
            present=present,
        )
        self.limits[load] = limit = NO_LIMIT if length >= longest else length
        return limit != before


@dataclass(slots=True, eq=False)
class SpeculationState:
    """The speculation policy's state of one session whose plan speculates."""

    workload: WorkloadStats | None
    """Statistics of the session's class; None if the drafts do not come by messages or no drafter
    can draft for the session."""
    in_process_class: WorkloadClass | None = None
    """Class of a session with in-process drafts; None for all other sessions."""
    wait: ProposalWait = field(default_factory=ProposalWait)
    last_round_s: float = math.nan
    """Time at which the session's last round ended, on a clock that leaves out the time that
    prompts add to rounds; nan before the first round."""
    unsettled_rounds: float = 1.0
    """Number of next rounds that are not typical of the shape, because the shape or the mode has
    changed."""

    @property
    def is_in_process(self) -> bool:
        """Whether the session has, or had until they were dropped, in-process drafts."""
        return self.in_process_class is not None

    @property
    def lacks_features(self) -> bool:
        """Whether no drafter can draft for the session, because its plan needs features that are no
        longer kept."""
        return self.workload is None and self.in_process_class is None

    def record_mode_change(self, *, paused: bool) -> None:
        """Record that the session's speculation was turned off (`paused`) or on."""
        self.unsettled_rounds = max(self.unsettled_rounds, 1.0 if paused else RESUME_ROUNDS)
        self.wait.is_catching_up = not paused

    def record_look_ahead_change(self) -> None:
        """Record that the session changes to look-ahead or to lock-step. The drafts of its next two
        rounds may still be made in the old way."""
        self.unsettled_rounds = max(self.unsettled_rounds, 2.0)

    def record_resume(self) -> None:
        """Record that the session's KV was computed again, so that the time since its last round is
        not counted."""
        if self.workload is not None and not math.isnan(self.last_round_s):
            self.workload.decoding -= 1
        self.last_round_s = math.nan

    def record_round_end(self, clock_s: float) -> float:
        """Record that a round of the session ended. Return the time since its previous round, in
        seconds; nan for the first round."""
        last_s, self.last_round_s = self.last_round_s, clock_s
        if self.workload is not None and last_s != last_s:
            self.workload.decoding += 1
        return max(0.0, clock_s - last_s) if last_s == last_s else math.nan

    def record_round(self, *, is_drafted: bool, is_off: bool, missed: bool) -> None:
        """Record a round of the session. `missed` is whether the round waited for a draft that did
        not arrive."""
        counts = is_drafted or is_off or missed
        self.unsettled_rounds -= 1.0 if counts else CATCH_UP_WEIGHT
