"""K/V blocks for the sessions that run: who is let in, grown, preempted (engine thread only).

What is decided is in `preemption`; here it is found out and done, between rounds. A preempted
session keeps all but its K/V: tokens, digest, handle, its drafter, the proposals that are held for
it, its features, the state of its form. What a runner keeps of it besides (stream keys, counts of
tokens, an own draft) is for `RoundRunner.suspend` and `resume` to save and bring back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

from outrider import timeline
from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from outrider.ids import SessionId
from outrider.speculation.cost_table import GAIN
from outrider_verifier.kv.preemption import (
    Action,
    Bounds,
    Claim,
    Lengths,
    Preempt,
    State,
    all_fit,
    choose_way,
    let_all_in,
    plan,
)
from outrider_verifier.kv.prefix_cache import Prefixes
from outrider_verifier.model_runner.interface import RoundRunner
from outrider_verifier.state.preemption_mode import PreemptionMode
from outrider_verifier.state.session import Session

logger = logging.getLogger(__name__)

GUARD_TOKENS: Final = 32
GUARD_S: Final = 1.0
"""A resumed session goes on for so many tokens, or so long, before others are preferred to it."""
AHEAD_TOKENS: Final = 64
"""Where K/V is plentiful, blocks for so many tokens more are held at a time: taking one, and
telling a device of it, costs as much as taking several."""
PLENTY: Final = 4
"""It is while free blocks would let every running session hold so much ahead so many times."""
LOOK_S: Final = 0.02
"""How often the policy is asked while sessions wait and nothing happens."""

Failed = Callable[[Session, Exception], None]
Begun = Callable[[Session], None]


class Room:
    """The sessions of a core that run and those that wait, and the pool that they share."""

    def __init__(
        self,
        *,
        pool: KVPool,
        runner: RoundRunner,
        swap: SwapSpace | None,
        bounds: Bounds,
        way: PreemptionMode | None,
        prefixes: Prefixes | None,
        counters: Counter[str],
    ) -> None:
        """`swap`: where preempted sessions may be swapped to. `way`: how they get their K/V back;
        None: by what either costs. `prefixes`: what sessions leave behind for others; None: nothing
        is kept. Blocks that the runner has taken are out of reach."""
        self._pool, self._runner, self._swap = pool, runner, swap
        self._bounds, self._way = bounds, way
        self._prefixes = prefixes
        self._counters = counters
        self._total = pool.free_blocks
        self.running: dict[SessionId, Session] = {}
        """Sessions with K/V, in the order in which they were let in."""
        self.waiting: dict[SessionId, Session] = {}
        self.lengths = Lengths()
        """Of the answers that ended."""
        self.failed: Failed = lambda session, bug: None
        """Called for a session that cannot be let in, which the policy found room for."""
        self.begun: Begun = lambda session: None
        """Called for a session that was let in, of whose prompt something was there already."""
        self.pressed = False
        """Whether somebody is to be preempted once the round in flight is settled."""
        self._recompute_s = 0.0
        """Of a token; 0: not known."""
        self._seen, self._again_at = -1, 0.0
        """What `touched` was when the policy was last asked, and when to ask it again."""

    def enter(self, session: Session) -> None:
        """A session was opened; it waits. Raises InvalidRequestError if it can never run."""
        self._runner.open(session)
        session.begun = True
        # Its plan may change yet. The last token is never written.
        session.most_blocks = self._pool.blocks_for(session.max_len - 1 + self._runner.slack.most)
        self.waiting[session.session_id] = session

    def leave(self, session: Session) -> None:
        """Forget a session and give back all that it holds; idempotent."""
        self.running.pop(session.session_id, None)
        self.waiting.pop(session.session_id, None)
        session.kv.release()
        if session.begun:
            session.begun = False
            self._runner.close(session)

    def keep_prefix(self, session: Session) -> None:
        """Let others begin with what a session has written."""
        if self._prefixes is not None and not session.waits:
            self._prefixes.keep(session)

    @property
    def prefix_blocks(self) -> int:
        """Blocks that sessions may begin with."""
        return 0 if self._prefixes is None else len(self._prefixes)

    @property
    def prefix_feature_bytes(self) -> int:
        """Host memory that the features of these take."""
        return 0 if self._prefixes is None else self._prefixes.feature_bytes

    @property
    def swapped_bytes(self) -> int:
        """Host memory that the K/V of preempted sessions takes."""
        return 0 if self._swap is None else self._swap.used_bytes

    def look_at(self, now: float) -> float | None:
        """When the policy wants to be asked again though nothing happens; None: never."""
        return max(now, self._again_at) if self.waiting else None

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens were prefilled, which took so long."""
        each_s = seconds / tokens
        self._recompute_s = (
            self._recompute_s + GAIN * (each_s - self._recompute_s) if self._recompute_s else each_s
        )

    # ---- before a round ------------------------------------------------------------------------

    def grow(self) -> bool:
        """Let every running session hold the blocks that its next rounds may write; False if they
        are not all there. Most rounds nobody needs any."""
        short = [s for s in self.running.values() if s.length > s.covered]
        return not short or self._hold_all(short, 0)

    def grow_ahead(self, sessions: Iterable[Session], tokens: int) -> None:
        """While a round runs, or drafts are made: let these sessions hold what they need once up to
        `tokens` more of each are committed, and tell the device, so that the next round need not
        wait for that. Where blocks are short nothing is done."""
        short = [s for s in sessions if s.length + tokens > s.covered and not s.ended]
        if short and self._hold_all(short, tokens):
            self._runner.tell_grown()

    def ready(self, now: float, *, touched: int, flying: Container[SessionId]) -> bool:
        """Before a round is planned: let in whom there is room for, preempt whom the policy picks,
        and have blocks for every running session. False: the round in flight, with the sessions
        `flying`, is to be settled first. `touched`: see `Core`."""
        grown = self.grow()
        due = self.waiting and (touched != self._seen or now >= self._again_at)
        if grown and not due and not self.pressed:
            return True
        actions = self._actions(now, grown=grown)
        self.pressed = any(
            [isinstance(action, Preempt) and action.session_id in flying for action in actions]
        )
        if self.pressed:
            return False
        self._seen, self._again_at = touched, now + LOOK_S
        self._act(actions, now)
        if not grown and not self.grow():
            raise AssertionError("blocks were preempted for and are not there")
        return True

    def _actions(self, now: float, *, grown: bool) -> list[Action]:
        running, waiting = self.running.values(), self.waiting.values()
        if grown and all_fit(
            most_blocks=sum([session.most_blocks for session in (*running, *waiting)]),
            sessions=len(running) + len(waiting),
            total_blocks=self._total,
            bounds=self._bounds,
        ):
            return let_all_in(
                [self._brief_claim(session, now) for session in waiting], self._bounds
            )
        state = State(
            free_blocks=self._pool.free_blocks,
            total_blocks=self._total,
            running=[self._claim(session, now) for session in running],
            waiting=[self._claim(session, now) for session in waiting],
        )
        return plan(state, self._bounds)

    def _brief_claim(self, session: Session, now: float) -> Claim:
        """Of a session that waits, as far as `let_all_in` looks at it."""
        since, most = session.waits_since, session.most_blocks
        held_next = session.kv_len + self._runner.slack.beyond(session)
        return Claim(
            session_id=session.session_id,
            priority=session.spec.priority,
            opened_at=session.opened_at,
            blocks=0,
            next_blocks=self._pool.blocks_for(held_next),
            most_blocks=most,
            expected_blocks=most,
            preemptions=session.preemptions,
            waited_s=session.waited_s + (0.0 if since is None else now - since),
        )

    def _claim(self, session: Session, now: float) -> Claim:
        spec = session.spec
        before = len(spec.token_ids) - spec.prompt_len
        answer = self.lengths.expected(before + session.emitted, before + spec.max_new_tokens)
        expected = spec.prompt_len + answer + self._runner.slack.beyond(session)
        lately = (
            session.length - session.resumed_len < GUARD_TOKENS
            and now - session.resumed_at < GUARD_S
        )
        return self._brief_claim(session, now)._replace(
            blocks=session.kv.num_blocks,
            shared=tuple(self._pool.ledger.shared(session.kv.blocks)),
            expected_blocks=min(session.most_blocks, self._pool.blocks_for(expected)),
            tokens=session.kv.len,
            guarded=session.preemptions > 0 and lately,
        )

    def _ahead(self) -> int:
        """Tokens for which sessions that need blocks take some ahead."""
        most = len(self.running) * self._pool.blocks_for(AHEAD_TOKENS) * PLENTY
        return AHEAD_TOKENS if not self.waiting and self._pool.free_blocks > most else 0

    # ---- effects -------------------------------------------------------------------------------

    def _hold_all(self, sessions: Sequence[Session], tokens: int) -> bool:
        """For `tokens` more of each, or for more where there is plenty; whether all have them."""
        tokens = max(tokens, self._ahead())
        return all([self._hold(session, tokens) for session in sessions])

    def _hold(self, session: Session, tokens: int) -> bool:
        """For `tokens` more than it has, but none past its end."""
        beyond = self._runner.slack.beyond(session)
        tokens = min(tokens, session.max_len - session.length)
        if not session.kv.reserve(session.kv_len + tokens + beyond):
            return False
        self._cover(session)
        self._runner.grown(session)
        return True

    def _act(self, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Preempt):
                self._preempt(self.running[action.session_id], now)
                continue
            session = self.waiting[action.session_id]
            if self.running and not self._runner.fetch(session):
                # Its copy comes beside the rounds, which do not wait for it; one at a time.
                self._seen = -1
                return
            self._let_in(session, action.blocks, now)

    def _cover(self, session: Session) -> None:
        session.covered = session.kv.capacity - self._runner.slack.beyond(session) + 1

    def _preempt(self, session: Session, now: float) -> None:
        swap = self._swap if self._way_of(session) is PreemptionMode.SWAP else None
        self.keep_prefix(session)
        way = (
            PreemptionMode.SWAP if self._runner.suspend(session, swap) else PreemptionMode.RECOMPUTE
        )
        session.preempted(now, swapped=way is PreemptionMode.SWAP)
        del self.running[session.session_id]
        self.waiting[session.session_id] = session
        self._counters[f"preemptions_{way.value}"] += 1
        timeline.instant(f"preempted, to {way.value}")

    def _way_of(self, session: Session) -> PreemptionMode:
        count, swap = session.kv.len, self._swap
        fits = swap is not None and count and swap.fits(count)
        return choose_way(
            swap_s=swap.seconds(count) if swap is not None and fits else None,
            recompute_s=self._recompute_s * count,
            wanted=self._way,
        )

    def _let_in(self, session: Session, blocks: int, now: float) -> None:
        slots, found, told = blocks * self._pool.block_tokens, 0, session.written
        if self._prefixes is not None and not session.swapped:
            found = self._prefixes.begin(session, slots)
        held = found > 0 or session.kv.reserve(slots)
        assert held, (session.session_id, blocks)
        try:
            kept = self._runner.resume(session)
        except Exception as bug:
            self.failed(session, bug)
            return
        session.let_in(now, kept=kept, found=found)
        if session.written > told:
            self.begun(session)
        self._cover(session)
        del self.waiting[session.session_id]
        self.running[session.session_id] = session
        if session.preemptions:
            self._counters["resumed_preemption"] += 1
            timeline.instant("resumed")
