"""Defines workload classes (sessions that are expected to speculate alike) and their measured
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
"""Maximum number of workload classes with statistics. The oldest class without sessions is deleted
first."""
REVIEW_ROUNDS: Final = 48
"""Number of drafted rounds of a class between two choices of its draft length."""
RESUME_ROUNDS: Final = 3.0
"""Number of drafted rounds, after a session's speculation was turned on again, that do not count as
typical. In these rounds its drafter and the other sessions are still adapting."""
CATCH_UP_WEIGHT: Final = 0.2
"""Amount by which a round without a draft reduces `SpeculationState.unsettled_rounds`. A round with
a draft reduces it by 1."""


class WorkloadClass(NamedTuple):
    """Properties by which sessions are grouped for statistics: sessions with equal values are
    expected to speculate alike."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Sampling temperature, rounded to one decimal place."""
    look_ahead: bool = False
    """Whether the plan allows look-ahead, that is, drafts made before the verdict."""
    fan_out: int = 0
    has_grammar: bool = False
    """Whether the sessions have a grammar. Such sessions are slower, because their rounds wait for
    the host, and have a different acceptance rate."""

    @classmethod
    def of_session(cls, session: Session) -> WorkloadClass:
        """Return the workload class of a session whose plan speculates."""
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
        """Shape of the drafts of this class's sessions if look-ahead is off."""
        return CandidateShape(self.draft_tokens, is_tree=self.top_k > 1)

    @property
    def shape_ahead(self) -> CandidateShape:
        """Shape of the drafts of this class's sessions if look-ahead makes them. It differs from
        `shape` only in `is_ahead`."""
        return self.shape._replace(is_ahead=True)

    def __str__(self) -> str:
        kind = "chain" if self.top_k == 1 else "tree"
        grammar = ", grammar" if self.has_grammar else ""
        sampling = f"{self.rule}, T {self.temperature}{grammar}"
        return f"{self.method} {kind} of {self.draft_tokens}, {sampling}"


@dataclass(slots=True)
class RowTally:
    """Sums over the rows of one workload class and draft shape in one round; see
    `RoundObservation`."""

    rows: int = 0
    tokens: int = 0
    squares: int = 0
    seconds: float = 0.0

    def add_row(self, tokens: int, seconds: float) -> None:
        """Add a row that emitted `tokens` tokens and ended `seconds` after the session's previous
        round."""
        self.rows += 1
        self.tokens += tokens
        self.squares += tokens * tokens
        self.seconds += seconds

    def take(self, sessions: int, *, is_settled: bool, weight: float) -> RoundObservation:
        """Return the sums and set them to 0. `sessions` is the number of decoding sessions of the
        class; the other arguments are fields of `RoundObservation`."""
        seen = RoundObservation(
            self.rows, self.tokens, self.squares, self.seconds, sessions, is_settled, weight
        )
        self.rows = self.tokens = self.squares = 0
        self.seconds = 0.0
        return seen


@dataclass(slots=True, eq=False)
class WorkloadStats:
    """Measured statistics of a workload class whose drafts come by messages."""

    workload_class: WorkloadClass
    controller: SpeculationController
    shapes: tuple[CandidateShape, ...]
    """Draft shapes that the sessions may have, including `OFF` (plain decoding). The first is the
    shape to start with."""
    acceptance: AcceptanceByDepth
    arrivals: tuple[ArrivalEstimate, ArrivalEstimate] = field(
        default_factory=lambda: (ArrivalEstimate(), ArrivalEstimate())
    )
    """Delays of proposals in lock-step (first entry) and with look-ahead (second entry). They are
    separate, because with look-ahead the drafter may be busy with other drafts."""
    sessions: int = 0
    """Number of sessions in this class."""
    decoding: int = 0
    """Number of these sessions that have decoded in a round; waiting and prefilling sessions are
    excluded."""
    shape: CandidateShape = OFF
    """Draft shape of the sessions' next round."""
    limits: dict[int, int] = field(default_factory=dict)
    """Maximum number of draft tokens to verify, by load. A load without an entry has no limit."""
    forwards: dict[int, ForwardTimes] = field(default_factory=dict)
    """Measured times of the target's forward pass, by load."""
    tallies: dict[tuple[CandidateShape, bool], RowTally] = field(default_factory=dict)
    """Sums over the rows of the round that is being recorded. The keys are the draft shape and
    `RoundObservation.is_settled`."""
    _rounds_since_review: int = 0
    _step_s: float = 0.0
    """Moving average of the time between two drafted rounds of a session, in seconds."""

    @property
    def is_plain(self) -> bool:
        """Whether the sessions should decode plainly."""
        return not self.shape.nodes

    @property
    def arrival(self) -> ArrivalEstimate:
        """Delays of proposals for the present shape: in lock-step or with look-ahead."""
        return self.arrivals[self.shape.is_ahead]

    def tally(self, shape: CandidateShape, is_settled: bool) -> RowTally:
        """Return the sums to which a row with drafts of `shape` must be added. `is_settled` is that
        of `RoundObservation`."""
        tally = self.tallies.get((shape, is_settled))
        if tally is None:
            tally = self.tallies[shape, is_settled] = RowTally()
        return tally

    def shape_of(self, session: Session) -> CandidateShape:
        """Return the draft shape that a session has at present."""
        if session.is_speculation_off:
            return OFF
        mine = self.workload_class
        return mine.shape_ahead if session.is_look_ahead_on else mine.shape

    def reset_drafter(self) -> None:
        """Discard all measurements, because the drafter was replaced."""
        self.controller = SpeculationController()
        self.arrivals = ArrivalEstimate(), ArrivalEstimate()
        self.acceptance = AcceptanceByDepth(self.workload_class.draft_tokens)
        self.limits.clear()
        self._rounds_since_review, self._step_s = 0, 0.0

    def draft_limit(self, load: int) -> int:
        """Return the maximum number of draft tokens to verify at a load."""
        return self.limits.get(load, NO_LIMIT)

    def observe_forward(self, load: int, nodes: int, seconds: float) -> None:
        """Record that a forward pass took `seconds`. `nodes` is the mean number of draft nodes of
        its rows."""
        self.forwards.setdefault(load, ForwardTimes()).observe_forward(nodes, seconds)

    def review_draft_length(self, load: int, step_s: float) -> bool:
        """Record a drafted round; after `REVIEW_ROUNDS` rounds, choose the draft length of chains
        again. Return whether the length has changed. `step_s` is the mean time between two rounds
        of a session, in seconds."""
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
    """State of the speculation policy for one session whose plan speculates."""

    workload: WorkloadStats | None
    """Statistics of the session's workload class; None if its drafts do not come by messages, or if
    no drafter can draft for it."""
    in_process_class: WorkloadClass | None = None
    """Workload class of a session with in-process drafts, also after these were dropped; None for
    all other sessions."""
    wait: ProposalWait = field(default_factory=ProposalWait)
    last_round_s: float = math.nan
    """Time at which the session's last round ended; nan before the first round. The clock excludes
    the time that prompts have added to rounds."""
    unsettled_rounds: float = 1.0
    """Number of next rounds that are not typical of the session's shape, because the shape or the
    mode has changed."""

    @property
    def is_in_process(self) -> bool:
        """Whether the session has in-process drafts, or had them until they were dropped."""
        return self.in_process_class is not None

    @property
    def lacks_features(self) -> bool:
        """Whether no drafter can draft for the session, because its draft method needs features
        that are no longer kept."""
        return self.workload is None and self.in_process_class is None

    def record_mode_change(self, *, paused: bool) -> None:
        """Record that the session's speculation was turned off (`paused` True) or on (False)."""
        self.unsettled_rounds = max(self.unsettled_rounds, 1.0 if paused else RESUME_ROUNDS)
        self.wait.is_catching_up = not paused

    def record_look_ahead_change(self) -> None:
        """Record that the session changes from lock-step to look-ahead or back. The drafts of its
        next two rounds may still be made in the old way."""
        self.unsettled_rounds = max(self.unsettled_rounds, 2.0)

    def record_resume(self) -> None:
        """Record that the session resumes after a time without rounds. That time is not counted as
        the duration of a round."""
        if self.workload is not None and not math.isnan(self.last_round_s):
            self.workload.decoding -= 1
        self.last_round_s = math.nan

    def record_round_end(self, clock_s: float) -> float:
        """Record that a round of the session ended at `clock_s`. Return the time since the end of
        its previous round, in seconds; nan for the first round."""
        last_s, self.last_round_s = self.last_round_s, clock_s
        if self.workload is not None and last_s != last_s:
            self.workload.decoding += 1
        return max(0.0, clock_s - last_s) if last_s == last_s else math.nan

    def record_round(self, *, is_drafted: bool, is_off: bool, missed: bool) -> None:
        """Record a round of the session. `is_drafted` is whether it verified a draft, `is_off`
        whether speculation was off, and `missed` whether it waited for a draft that did not
        arrive."""
        counts = is_drafted or is_off or missed
        self.unsettled_rounds -= 1.0 if counts else CATCH_UP_WEIGHT
