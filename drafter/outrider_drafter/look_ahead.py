"""Drafts for outcomes that have not happened: whose, for which, and what verdicts make of them.

Of a session that looks ahead the live proposal is known, the one that its verifier has, and which
drafts went out for outcomes of it. A verdict that ends in one of these is a hit: that draft is the
live proposal then, and nothing is drafted for its prefix again.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider import trace
from outrider.spec.digest import extend_digests
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposals, SessionsLost
from outrider_drafter.calibration import SHARPNESS, Calibration, FixedSpread, Predictor
from outrider_drafter.fair import MOST_TOGETHER, first_served
from outrider_drafter.metrics import Metrics
from outrider_drafter.outcomes import (
    BRANCH_SIZES,
    Floats,
    Indices,
    Layout,
    best,
    seen,
    worth_drafting,
)
from outrider_drafter.sessions import Session
from outrider_drafter.source import (
    AheadSource,
    Branches,
    Drafted,
    DraftSource,
    Live,
    Outcome,
    Scored,
    Trees,
)
from outrider_drafter.table import SessionTable

logger = logging.getLogger(__name__)

MAX_FAN_OUT: Final = 16
"""Outcomes of a proposal where its plan leaves them to the drafter, at most: more are foreseen more
often, but come too late (decision 20)."""
MAX_BRANCHES: Final = BRANCH_SIZES[-1]
"""Outcomes of all sessions that one launch drafts for."""
_TEMPERATURES: Final = (0.0, 0.5, 0.85, 1.15)
"""Upper ends of the classes whose sessions learn from each other."""

Answers = list[tuple[int, Proposals | SessionsLost]]
"""(connection, message): what goes out together."""
Kind = tuple[DraftMethod, Rule, int]


class _Expected(NamedTuple):
    """Outcomes that are to be drafted for; [K] each."""

    lives: Indices
    nodes: Indices
    tokens: NDArray[np.int32]
    digests: NDArray[np.uint64]
    """Of the prefixes that they make."""
    lengths: Indices
    """Of these prefixes."""
    gains: Floats

    def only(self, which: Indices | slice) -> _Expected:
        """Some of them, in this order."""
        return _Expected(
            self.lives[which],
            self.nodes[which],
            self.tokens[which],
            self.digests[which],
            self.lengths[which],
            self.gains[which],
        )


class _Scored(NamedTuple):
    """One of the live proposals that were scored together."""

    layout: Layout
    logprobs: NDArray[np.float32]
    """[P, c] of the candidates."""
    proposal: int
    """Its place among them."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A session that looks ahead."""

    session: Session
    tree: DraftTree | None = None
    """The live proposal; None while there is none."""
    length: int = 0
    """Tokens of the prefix that it continues."""
    scored: _Scored | None = None
    """What is known of it, once it was scored."""
    branches: dict[int, DraftTree] = field(default_factory=dict)
    """What was sent for outcomes of the live proposal, by prefix digest."""
    pending: int = 0
    """Outcomes that were chosen and not drafted for yet."""

    def take_up(self, tree: DraftTree | None) -> None:
        """There is another live proposal, for the session's present prefix."""
        self.tree, self.length = tree, len(self.session.tokens)
        self.scored, self.branches, self.pending = None, {}, 0


class LookAhead:
    """All sessions that look ahead. Every method is called from the engine's thread."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        table: SessionTable,
        metrics: Metrics,
        *,
        now: Callable[[], float],
        later: Callable[[Callable[[], None]], None],
        failed: Callable[[], None],
    ) -> None:
        """`later` keeps what can wait until nobody waits for a draft; `failed` is told of every
        failure of a source."""
        self._sources = {s.method: s for s in sources if isinstance(s, AheadSource)}
        self._table = table
        self._metrics = metrics
        self._now, self._later, self._failed = now, later, failed
        self.watched: dict[int, _Watched] = {}
        """By slot; empty if no session looks ahead."""
        slots = len(table.followed)
        self._is_watched = np.zeros(slots, dtype=np.bool_)
        self._open = np.zeros(slots, dtype=np.bool_)
        """[X]: whether there may be outcomes to draft for."""
        self._off: set[int] = set()
        """Slots of sessions whose look-ahead has failed."""
        self._predictors: dict[Kind, Predictor] = {}
        self._starved = False
        """Whether the last scores came to nothing because a message waited: many verifiers may send
        faster than one can score, so the next ones are used first."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a live proposal whose outcomes were not all drafted for."""
        return bool(self.watched) and bool(self._open.any())

    def watch(self, session: Session) -> None:
        """A session began, or has another plan: what was sent ahead by the old one is forgotten."""
        self._unwatch(session.slot)
        plan = session.plan
        if not (plan.look_ahead and plan.speculative) or session.slot in self._off:
            return
        if plan.method in self._sources:
            self.watched[session.slot] = _Watched(session)
            self._is_watched[session.slot] = True

    def forget(self, session: Session) -> None:
        """A session ended, or was lost."""
        self._unwatch(session.slot)
        self._off.discard(session.slot)

    def _unwatch(self, slot: int) -> None:
        if self.watched.pop(slot, None) is not None:
            self._is_watched[slot] = self._open[slot] = False

    def take_up(self, drafted: Drafted) -> None:
        """These drafts are live now."""
        watched = [self.watched.get(session.slot) for session in drafted.sessions]
        if not any(watched):
            return
        trees = _trees(drafted)
        for one, tree in zip(watched, trees, strict=True):
            if one is not None:
                one.take_up(tree if len(tree) else None)
                # An outcome takes a token, and a draft for it one more.
                self._open[one.session.slot] = one.tree is not None and one.session.room >= 2

    def follow(self, slots: Indices) -> None:
        """The sessions in these slots were moved on: those that were drafted for want no draft."""
        mine = slots[self._is_watched[slots]]
        for slot, length, digest in zip(
            mine.tolist(),
            self._table.lengths[mine].tolist(),
            self._table.digests[mine].tolist(),
            strict=True,
        ):
            one = self.watched[slot]
            if one.tree is not None and length > one.length:
                self._move_on(one, slot, digest)

    def _move_on(self, one: _Watched, slot: int, digest: int) -> None:
        metrics = self._metrics
        if one.pending:
            metrics.dropped_outcomes.inc(one.pending)
        if one.scored is not None:
            told = self._table.tokens[slot, one.length : self._table.lengths[slot]].tolist()
            predictor = self._predictor(_kind(one.session))
            self._later(partial(_learn, predictor, one.scored, told))
        tree = one.branches.get(digest)
        hit = tree is not None and bool(self._table.wanting[slot])
        trace.instant("hit" if hit else "miss")
        metrics.outcomes.labels("hit" if hit else "miss").inc()
        if hit:
            self._table.wanting[slot] = False
        one.take_up(tree if hit else None)
        self._open[slot] = hit and one.session.room >= 2

    def work(self) -> Generator[Answers]:
        """Draft for the outcomes of live proposals (of all, or of so many that are drafted for
        together: fair shares of all verifiers), best expected gain first; yields
        (connection, drafts) that are ready together. Where nothing is ready yet it yields nothing,
        so that what has come meanwhile can be looked at.

        As soon as a session may have moved the iterator must be closed; what is left is chosen
        anew, from scores of its own, in the next one.
        """
        slots = np.flatnonzero(self._open)
        if len(slots) > MOST_TOGETHER:
            owners = [self.watched[slot].session.key.connection for slot in slots.tolist()]
            used_at = self._table.used_at[slots]
            slots = slots[first_served(np.array(owners), used_at, MOST_TOGETHER)]
        open_ones = [self.watched[slot] for slot in slots.tolist()]
        open_ones.sort(key=lambda one: one.session.plan.method)
        for method, group in groupby(open_ones, key=lambda one: one.session.plan.method):
            ones = list(group)
            try:
                yield from self._look(self._sources[method], ones)
            except Exception:
                logger.exception("look-ahead failed", extra={"sessions": len(ones)})
                self._metrics.look_ahead_failures.labels(method).inc()
                for one in ones:
                    self._unwatch(one.session.slot)
                    self._off.add(one.session.slot)
                self._failed()

    def _look(self, source: AheadSource, ones: Sequence[_Watched]) -> Generator[Answers]:
        started = self._now()
        expected = self._choose(source, ones)
        seconds = self._metrics.look_ahead_seconds
        trace.span("score", started, len(ones))
        self._later(partial(seconds.labels("score").observe, self._now() - started))
        for first in range(0, len(expected.lives), MAX_BRANCHES):
            if first or not self._starved:
                self._starved = not first
                yield []
            started = self._now()
            launch = expected.only(slice(first, first + MAX_BRANCHES))
            outcomes = [
                Outcome(*entry)
                for entry in zip(
                    launch.lives.tolist(),
                    launch.nodes.tolist(),
                    launch.tokens.tolist(),
                    strict=True,
                )
            ]
            began = self._now()
            for branches in source.branch(outcomes):
                self._starved = False
                trace.span("branch", began, len(branches.outcomes))
                yield self._sent(ones, launch, branches, self._now() - started)
                began = self._now()
            self._later(partial(seconds.labels("branch").observe, self._now() - started))
        for one in ones:
            one.pending = 0
            self._open[one.session.slot] = False

    def _choose(self, source: AheadSource, ones: Sequence[_Watched]) -> _Expected:
        """Score live proposals and choose among their outcomes, best first."""
        self._metrics.look_aheads.labels(source.method).inc()
        scored = source.score([Live(one.session, one.tree) for one in ones if one.tree is not None])
        kinds: dict[tuple[Kind, int], list[int]] = {}
        for live, one in enumerate(ones):
            width = scored.tokens[live].shape[1]
            kinds.setdefault((_kind(one.session), width), []).append(live)
        parts = [
            part
            for (kind, _), lives in kinds.items()
            for part in self._outcomes(kind, lives, [ones[live] for live in lives], scored)
        ]
        found = _Expected(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        found = found.only(np.argsort(-found.gains, kind="stable"))
        # Those that no plan asks for share one launch.
        mine = np.array([one.session.plan.fan_out == 0 for one in ones])[found.lives]
        left_out = np.flatnonzero(mine)[worth_drafting(found.gains[mine]) :]
        found = found.only(np.delete(np.arange(len(mine)), left_out))
        pending = np.bincount(found.lives, minlength=len(ones)).tolist()
        for one, count in zip(ones, pending, strict=True):
            one.pending = count
        return found

    def _outcomes(
        self, kind: Kind, lives: Sequence[int], ones: Sequence[_Watched], scored: Scored
    ) -> Iterator[_Expected]:
        """Of each of these proposals, all of one kind and with as many candidates a place."""
        trees = [one.tree for one in ones if one.tree is not None]
        layout = Layout.of(trees, np.concatenate([scored.tokens[live] for live in lives]))
        logprobs = np.concatenate([scored.logprobs[live] for live in lives])
        gains = self._predictor(kind).gains(layout, logprobs)
        slots = np.array([one.session.slot for one in ones])
        digests = layout.digests(self._table.digests[slots])
        for proposal, (live, one) in enumerate(zip(lives, ones, strict=True)):
            one.scored = _Scored(layout, logprobs, proposal)
            wanted, there = one.session.plan.fan_out or MAX_FAN_OUT, one.branches
            count = wanted + len(there)
            chosen = best(layout, gains, proposal, room=one.session.room, count=count)
            found = _Expected(
                lives=np.full(len(chosen.places), live),
                nodes=chosen.places - layout.roots[proposal] - 1,
                tokens=chosen.tokens,
                digests=extend_digests(digests[chosen.places], chosen.tokens),
                lengths=one.length + layout.depths[chosen.places] + 1,
                gains=chosen.gains,
            )
            if there:
                # A message came between them and these.
                new = [i for i, digest in enumerate(found.digests.tolist()) if digest not in there]
                found = found.only(np.array(new[: max(wanted - len(there), 0)], dtype=np.int64))
            yield found

    def _sent(
        self, ones: Sequence[_Watched], launch: _Expected, branches: Branches, seconds: float
    ) -> Answers:
        """Keep what was made, and address it."""
        places = branches.outcomes
        lives = launch.lives[places].tolist()
        trees = _trees(branches)
        digests = launch.digests[places]
        for live, digest, tree in zip(lives, digests.tolist(), trees, strict=True):
            ones[live].pending -= 1
            if len(tree):
                ones[live].branches[digest] = tree
        keys = [ones[live].session.key for live in lives]
        handles = np.array([key.handle for key in keys], dtype=np.int64)
        proposals = branches.proposals(handles, digests, launch.lengths[places], seconds)
        method = ones[0].session.plan.method
        made = int(np.count_nonzero(branches.node_counts))
        self._later(partial(self._metrics.branches.labels(method).inc, made))
        owners = np.array([key.connection for key in keys], dtype=np.int64)
        there = branches.node_counts > 0
        return [
            (number, proposals.only(np.flatnonzero(there & (owners == number))))
            for number in dict.fromkeys(owners[there].tolist())
        ]

    def _predictor(self, kind: Kind) -> Predictor:
        if kind not in self._predictors:
            _, rule, _ = kind
            spread = rule is Rule.REJECTION
            begins = SHARPNESS.get(rule, 1.0)
            self._predictors[kind] = FixedSpread() if spread else Calibration(begins)
        return self._predictors[kind]


def _kind(session: Session) -> Kind:
    """Whom a session learns with."""
    sampling = session.sampling
    warmth = bisect_left(_TEMPERATURES, sampling.temperature)
    return session.plan.method, sampling.effective_rule, warmth


def _learn(predictor: Predictor, scored: _Scored, told: Sequence[int]) -> None:
    what = seen(scored.layout, scored.proposal, told)
    predictor.learn(scored.layout, scored.logprobs, what)


def _trees(drafts: Trees) -> list[DraftTree]:
    """Each draft's tree, in memory of its own."""
    tokens, parents = drafts.tokens.copy(), drafts.parents.copy()
    logprobs = drafts.logprobs.copy()
    ends = drafts.node_counts.cumsum().tolist()
    return [
        DraftTree(tokens[begin:end], parents[begin:end], logprobs[begin:end])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
