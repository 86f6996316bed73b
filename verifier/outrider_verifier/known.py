"""What the planner keeps: of a kind of session, and of one session."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.ids import DrafterId
from outrider.spec.contest import Contest, Mode
from outrider.spec.estimates import AcceptanceEstimate, ArrivalEstimate
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider_verifier.sessions import NO_LIMIT, Session


class Kind(NamedTuple):
    """What sessions share whose speculation goes alike."""

    drafter_id: DrafterId | None
    method: DraftMethod
    draft_tokens: int
    top_k: int
    rule: Rule
    temperature: float
    """Rounded to tenths."""

    @classmethod
    def of(cls, session: Session) -> Kind:
        """The kind of a session with a speculative plan."""
        plan, sampling = session.plan, session.spec.sampling
        return cls(
            drafter_id=session.spec.drafter_id,
            method=plan.method,
            draft_tokens=plan.draft_tokens,
            top_k=plan.top_k,
            rule=sampling.rule,
            temperature=round(sampling.temperature, 1),
        )

    def no_easier_than(self, other: Kind) -> bool:
        """Whether the same drafts are at least as hard to make stand as for `other`: those of
        hotter sessions stand less often."""
        return self[:4] == other[:4] and self.temperature >= other.temperature

    def __str__(self) -> str:
        shape = "chain" if self.top_k == 1 else "tree"
        named = f"{self.method} {shape} of {self.draft_tokens}"
        return f"{named}, {self.rule}, T {self.temperature}"


@dataclass(slots=True)
class Tally:
    """What sessions of one kind and mode got in a round; cleared when it has been judged."""

    known: Known
    mode: Mode
    settled: bool
    rows: int = 0
    tokens: int = 0
    squares: int = 0
    """Of each row's tokens."""
    seconds: float = 0.0
    """Of each row since the one before it ended, what prompts added to rounds left out."""
    alone_s: float = 0.0
    """Seconds of these in which rounds of nothing but prompts ran."""

    def clear(self) -> None:
        """Begin with the next round."""
        self.rows = self.tokens = self.squares = 0
        self.seconds = self.alone_s = 0.0


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a kind."""

    kind: Kind
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    arrival: ArrivalEstimate = field(default_factory=ArrivalEstimate)
    contests: dict[int, Contest] = field(default_factory=dict)
    """By load: see `Loads`."""
    sessions: int = 0
    limit: int = NO_LIMIT
    """Draft levels worth verifying."""
    judged: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rounds by (levels of the draft, levels that stood) since the last review."""
    review: int = 0
    """Rounds since then."""
    starved: int = 0
    """Rounds in a row whose times told nothing."""
    tallies: tuple[Tally, ...] = ()
    """By mode and whether it is settled: see `tally`."""
    fresh_at: int = -1
    """The round for which the next three were looked up."""
    plain: bool = False
    """Whether its sessions are to decode plainly."""
    patience_s: float = 0.0
    why: int = 0
    """Flags of `accounting.REASON_FLAGS`."""

    def __post_init__(self) -> None:
        self.tallies = tuple(
            Tally(self, mode, settled)
            for mode in (Mode.SPECULATE, Mode.PLAIN)
            for settled in (False, True)
        )

    def share(self) -> None:
        """Let `acceptance` have what was judged since the last time."""
        levels = max((depth for depth, _ in self.judged), default=0)
        tried, stood = [0] * levels, [0] * levels
        for (depth, accepted), rounds in self.judged.items():
            # What lies behind the first rejection was not tried.
            for level in range(min(accepted + 1, depth)):
                tried[level] += rounds
            for level in range(min(accepted, depth)):
                stood[level] += rounds
        self.judged.clear()
        self.acceptance.add(tried, stood)


def begun_contest(known: Known, others: Iterable[Known], load: int) -> Contest:
    """The contest of a kind at a load at which it has none that is decided: it begins with what was
    found at the nearest load, or plainly where easier drafts of the same drafter lose there."""
    held = known.contests
    decided = [other for other in held if held[other].decided]
    if decided:
        near = min(decided, key=lambda other: abs(other - load))
        return Contest.beside(held[near], near - load)
    for other in others:
        found = other.contests.get(load)
        if found is None or not found.decided or found.mode is not Mode.PLAIN:
            continue
        if other is not known and known.kind.no_easier_than(other.kind):
            return Contest.beside(found)
    return held.get(load) or Contest()


@dataclass(slots=True, eq=False)
class Pace:
    """What the planner keeps of one session."""

    known: Known
    own: bool
    """Whether drafts are made in this process."""
    last_at: float = math.nan
    """When its last round ended; nan before its first one."""
    prompts_s: float = 0.0
    alone_s: float = 0.0
    """What `Loads` had counted then."""
    settled: bool = False
    """Whether its last round was in the mode of its present one."""
    holding: bool = True
    """Whether its drafter is thought to be catching up, and given more time for that."""
    missed_len: int = -1
    """Length of the prefix whose proposal did not come in time, and since when it was awaited."""
    missed_at: float = 0.0
    unheard: int = 0
    """Rounds that did not wait since the drafter became suspect."""
    hold_after: int = 0
    """How many of these there may be before it is waited for once more."""
