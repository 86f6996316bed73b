"""Statistics of a workload class, and the speculation state of a session."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.ids import DrafterId
from outrider.spec.decoding_mode import DecodingMode
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.speculation.estimates import AcceptanceEstimate, ArrivalEstimate
from outrider.speculation.look_ahead_controller import LookAheadController
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.state.session import NO_LIMIT, Session

HOLD_ROUNDS: Final = 16
"""Rounds without a wait after which a stalled drafter is waited for once more; doubles each time
that this is in vain."""
MAX_HOLD_ROUNDS: Final = 256
CATCH_UP_ROUNDS: Final = 16
"""Rounds without a draft in which a session that resumes says nothing of drafts."""
MISS_WEIGHT: Final = 4
"""What one that waited in vain counts as of these: it has cost all that a miss does."""
CATCH_UP_S: Final = 1.0
"""How long a drafter that was missed once may be silent before rounds that do not wait for it count
among them: reading what 64 sessions missed takes .25 s."""
MODE_CHANGE_ROUNDS: Final = 1
RESUME_ROUNDS: Final = 3
LOOK_AHEAD_CHANGE_ROUNDS: Final = 2
"""Rounds of a session that tell of a change and not of what is changed to: of one that begins or
pauses; of one that is drafted for again, which the drafter has to catch up with, as with all others
that were paused, and which are out of step until then (64 sessions at an 8B's cost: 17 to 25 ms a
round for some three rounds, then 11); and of one between lock-step and look-ahead, where the drafts
of the round under way are of the old way still."""


class WorkloadClass(NamedTuple):
    """What sessions share whose speculation goes alike."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Rounded to tenths."""
    look_ahead: bool = False
    """Whether they may be drafted for ahead of their verdicts."""
    fan_out: int = 0
    has_grammar: bool = False
    """Whether they are in grammars: their rounds wait for the host, and other drafts are
    accepted."""

    @classmethod
    def of_session(cls, session: Session) -> WorkloadClass:
        """The kind of a session with a speculative plan."""
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

    def is_at_least_as_hard(self, other: WorkloadClass) -> bool:
        """Whether the same drafts are at least as hard to make stand as for `other`: those of
        hotter sessions, and those in grammars, stand less often."""
        harder = self.temperature >= other.temperature and self.has_grammar >= other.has_grammar
        return self[:4] == other[:4] and harder

    def __str__(self) -> str:
        shape = "chain" if self.top_k == 1 else "tree"
        named = f"{self.method} {shape} of {self.draft_tokens}"
        bound = ", in grammars" if self.has_grammar else ""
        return f"{named}, {self.rule}, T {self.temperature}{bound}"


@dataclass(slots=True)
class RoundTally:
    """What sessions of one kind and mode got in a round; cleared when it has been judged."""

    workload: WorkloadStats
    mode: DecodingMode
    is_looking_ahead: bool
    """Whether the drafter had been told to look ahead."""
    is_load_steady: bool
    rows: int = 0
    tokens: int = 0
    squares: int = 0
    """Of each row's tokens."""
    seconds: float = 0.0
    """Of each row since the one before it ended, what prompts added to rounds left out."""
    alone_s: float = 0.0
    """Seconds of these in which rounds of nothing but prompts ran."""
    hits: int = 0
    """Rows whose draft was made before their prefix was known."""
    missed_rows: int = 0
    """Rows that went without a draft, wanted or not: each emitted a token."""

    def to_observation(self, *, timed: bool, stands_for: int) -> RoundObservation:
        """The round as a speculation controller sees it; `timed`: whether its seconds tell
        anything."""
        return RoundObservation(
            rows=self.rows,
            tokens=self.tokens,
            squares=self.squares,
            seconds=self.seconds,
            sessions=self.workload.sessions,
            is_load_steady=self.is_load_steady,
            is_timed=timed,
            eligible_share=1.0 - self.workload.num_featureless / max(1, self.workload.sessions),
            weight=stands_for,
        )

    def add_rows(
        self, rows: int, tokens: int, squares: int, seconds: float, alone_s: float
    ) -> None:
        """Count rows that took `seconds` together."""
        self.rows += rows
        self.tokens += tokens
        self.squares += squares
        self.seconds += seconds
        self.alone_s += alone_s

    def clear(self) -> None:
        """Begin with the next round."""
        self.rows = self.tokens = self.squares = self.hits = self.missed_rows = 0
        self.seconds = self.alone_s = 0.0


@dataclass(slots=True, eq=False)
class WorkloadStats:
    """Measured statistics and controllers of a workload class."""

    workload_class: WorkloadClass
    look_ahead: LookAheadController | None = None
    """Whether its sessions are drafted for ahead of their verdicts; None: never."""
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    arrivals: tuple[ArrivalEstimate, ArrivalEstimate] = field(
        default_factory=lambda: (ArrivalEstimate(), ArrivalEstimate())
    )
    """Of proposals that were waited for, in lock-step and under look-ahead: there the drafter may
    be busy with what it drafts ahead. A hit does not arrive, it was there."""
    controllers: dict[int, SpeculationController] = field(default_factory=dict)
    """By load: see `LoadStats`."""
    sessions: int = 0
    num_featureless: int = 0
    """Of these, sessions that keep no features, so that nobody can draft for them."""
    collect_features_until: int = 0
    """The round of `LoadStats` until which sessions keep features, so that they can be tried."""
    limits: dict[int, int] = field(default_factory=dict)
    """Draft levels worth verifying, by load; absent: all."""
    accepted_levels: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rounds by (levels of the draft, levels that stood) since the last review."""
    rounds_since_review: int = 0
    """Rounds with drafts since then."""
    starved_rounds: int = 0
    """Rounds in a row whose times told nothing."""
    tallies: tuple[RoundTally, ...] = ()
    """Of lock-step, look-ahead and plain decoding, unsettled and settled: see `RoundTally`."""
    refresh_round: int = -1
    """The round for which the next ones were looked up."""
    is_looking_ahead: bool = False
    """Whether look-ahead is in force."""
    is_plain: bool = False
    """Whether its sessions are to decode plainly."""
    is_held: bool = False
    """Whether those that are paused stay so until the load has lasted,"""
    excludes_finishing_sessions: bool = False
    """and those that are about to end do for good: what is tried, all have to try,"""
    begins_plainly: bool = False
    """and those that begin do so without drafts."""
    drops_features: bool = False
    """Whether those that do keep no features any more."""
    proposal_timeout_s: float = 0.0
    reason_flags: int = 0
    """Flags of `accounting.REASON_FLAGS`."""

    def __post_init__(self) -> None:
        ways = (
            (DecodingMode.SPECULATE, False),
            (DecodingMode.SPECULATE, True),
            (DecodingMode.PLAIN, False),
        )
        self.tallies = tuple(
            RoundTally(self, mode, ahead, settled)
            for mode, ahead in ways
            for settled in (False, True)
        )

    def get_tally(self, paused: bool, ahead: bool, *, settled: bool) -> RoundTally:
        """Where a row of a session counts that is paused or drafted for ahead."""
        return self.tallies[2 * (2 if paused else ahead) + settled]

    def draft_limit(self, load: int) -> int:
        """Draft levels worth verifying at a load: one session's says nothing of many."""
        return self.limits.get(load, NO_LIMIT)

    @property
    def arrival(self) -> ArrivalEstimate:
        """When proposals arrive the way that is in force."""
        return self.arrivals[self.is_looking_ahead]

    @property
    def mean_wait_s(self) -> float:
        """How long a row waits for its proposal, in the mean: what was drafted ahead is there at
        once; 0 while unknown."""
        share = (
            self.look_ahead.miss_share
            if self.is_looking_ahead and self.look_ahead is not None
            else 1.0
        )
        return share * self.arrival.mean_s

    def summaries(self, load: int) -> Iterator[str]:
        """What is in force for it at a load and why, while it is being served."""
        controller = self.controllers.get(load)
        if not self.sessions or controller is None:
            return
        gain = format_gain(controller.gain)
        decision = f"{controller.current_mode} ({controller.decision_reason}{gain})"
        yield f"{self.workload_class}: {decision}"
        if self.look_ahead is not None:
            way = "look-ahead" if self.look_ahead.is_active(load) else "lock-step"
            gain = format_gain(self.look_ahead.gain(load), "lock-step")
            yield f"{self.workload_class}: {way}{gain}"

    def reset_drafter(self) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        self.controllers.clear()
        self.arrivals = ArrivalEstimate(), ArrivalEstimate()
        if self.look_ahead is not None:
            self.look_ahead.reset_drafter()

    def share_acceptance(self) -> None:
        """Let `acceptance` have what was judged since the last time."""
        levels = max((depth for depth, _ in self.accepted_levels), default=0)
        tried, stood = [0] * levels, [0] * levels
        for (depth, accepted), rounds in self.accepted_levels.items():
            # What lies behind the first rejection was not tried.
            for level in range(min(accepted + 1, depth)):
                tried[level] += rounds
            for level in range(min(accepted, depth)):
                stood[level] += rounds
        self.accepted_levels.clear()
        self.acceptance.add_rounds(tried, stood)


def format_gain(gain: float, over: str = "plain") -> str:
    """A gain as summaries say it; "" while it is not known."""
    return "" if math.isnan(gain) else f", {gain:.2f}x of {over}"


def start_controller(
    known: WorkloadStats, others: Iterable[WorkloadStats], load: int
) -> SpeculationController:
    """The speculation controller of a kind at a load at which it has none that is decided: it
    begins with what was found at the nearest load, or plainly where easier drafts of the same
    drafter lose there."""
    held = known.controllers
    decided = [other for other in held if held[other].is_decided]
    if decided:
        near = min(decided, key=lambda other: abs(other - load))
        return SpeculationController.from_other_load(held[near], near - load)
    for other in others:
        found = other.controllers.get(load)
        if found is None or not found.is_decided or found.current_mode is not DecodingMode.PLAIN:
            continue
        if other is not known and known.workload_class.is_at_least_as_hard(other.workload_class):
            return SpeculationController.from_other_load(found)
    return held.get(load) or SpeculationController()


@dataclass(frozen=True, slots=True, eq=False)
class RoundMark:
    """The end of a round."""

    ended_at: float
    prompts_s: float
    alone_s: float
    """What `LoadStats` had counted then."""

    def elapsed_since(self, last: RoundMark) -> tuple[float, float]:
        """Seconds from the end of `last`, what prompts added to rounds left out; and how many of
        them went to rounds of nothing but prompts."""
        spent_s = self.ended_at - last.ended_at - (self.prompts_s - last.prompts_s)
        return spent_s, self.alone_s - last.alone_s


@dataclass(slots=True, eq=False)
class SpeculationState:
    """What the planner keeps of one session, and how long that waits for its drafter."""

    workload: WorkloadStats
    is_in_process: bool
    """Whether drafts are made in this process."""
    lacks_features: bool = False
    """Whether it is counted as one that nobody can draft for."""
    last_round: RoundMark | None = None
    """The end of its last round, shared by the sessions of that; None before its first one."""
    unsettled_rounds: int = MODE_CHANGE_ROUNDS
    """Rounds to come that tell of a change."""
    catch_up_rounds_left: int = 0
    """Rounds without a draft that may yet go by before they tell of more than that its drafter has
    to catch up with it,"""
    proposals_late_since: float = 0.0
    """and from when on those count that do not wait."""
    is_holding: bool = True
    """Whether its drafter is thought to be catching up, and given more time for that."""
    missed_prefix_len: int = -1
    """Length of the prefix whose proposal did not come in time, and since when it was awaited."""
    missed_at: float = 0.0
    rounds_without_proposal: int = 0
    """Rounds that did not wait since the drafter became suspect."""
    is_silent: bool = False
    """Whether its drafter says nothing to anybody: so it is not tried, it will be heard."""
    hold_delay_rounds: int = HOLD_ROUNDS
    """How many of these there may be before it is waited for once more."""

    def record_mode_change(self, now: float, *, paused: bool) -> None:
        """The session pauses or resumes."""
        self.unsettled_rounds = max(
            self.unsettled_rounds, MODE_CHANGE_ROUNDS if paused else RESUME_ROUNDS
        )
        self.catch_up_rounds_left = 0 if paused else CATCH_UP_ROUNDS
        self.proposals_late_since = now + CATCH_UP_S
        self.is_holding = not paused

    def record_round(self, *, drafted: bool, missed: bool = False) -> None:
        """A round of it went by, with or without a draft of its drafter; `missed`: it had waited
        for one."""
        if not drafted and self.catch_up_rounds_left > 0:
            self.catch_up_rounds_left -= MISS_WEIGHT if missed else 1
            return
        self.catch_up_rounds_left = 0
        self.unsettled_rounds -= 1

    def record_look_ahead_change(self) -> None:
        """It goes over to look-ahead or to lock-step."""
        self.unsettled_rounds = LOOK_AHEAD_CHANGE_ROUNDS

    def record_resume(self) -> None:
        """Its K/V is, or was, computed once more: what passed since its last round tells nothing of
        rounds."""
        self.last_round = None

    def record_arrival(
        self, session: Session, *, prefix_len: int, usable: bool, now: float
    ) -> None:
        """A proposal came that was not there when its prefix was; `usable`: it is for the present
        one."""
        arrival = self.workload.arrivals[session.is_look_ahead_on]
        if usable:
            # The first one after a pause or a miss shows what catching up takes, not drafting.
            if not self.is_holding:
                arrival.observe_arrival(now - session.root_known_at)
            self.record_healthy()
        elif prefix_len == self.missed_prefix_len:
            arrival.observe_arrival(now - self.missed_at)
            # It was late: wait for it once, so that plain rounds do not outrun it for good.
            self.is_holding = True

    def record_healthy(self) -> None:
        """The drafter follows."""
        self.is_holding, self.hold_delay_rounds = False, HOLD_ROUNDS

    def record_timeout(self, session: Session) -> None:
        """A proposal timeout ran out."""
        self.missed_prefix_len, self.missed_at = session.length, session.root_known_at
        self.rounds_without_proposal, self.is_holding = 0, True

    def record_skipped_round(self, session: Session) -> None:
        """A round went by that did not wait for the drafter, if that is stalled."""
        if not session.has_stalled_drafter:
            return
        self.rounds_without_proposal += 1
        if self.rounds_without_proposal >= self.hold_delay_rounds and not self.is_silent:
            # Told of every round, a drafter that is well again needs no more than usual.
            session.has_stalled_drafter, self.is_holding, self.rounds_without_proposal = (
                False,
                False,
                0,
            )
            self.hold_delay_rounds = min(2 * self.hold_delay_rounds, MAX_HOLD_ROUNDS)
