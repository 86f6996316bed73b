"""Sessions that decode plainly under a high load resume at a lower one once that has lasted."""

from __future__ import annotations

from typing import Any

from outrider_verifier.planner.load_burst_hold import MIN_TOKENS_LEFT
from outrider_verifier.planner.load_stats import LOWER_LOAD_ROUNDS, RoundSample
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.session import Session

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.speculation_controller import SpeculationController
from tests.fakes.target import NO_BLOCKS
from tests.unit.verifier.harness import LONG, make_spec

MANY, FEW = 6, 3
"""Loads: 64 sessions and 8."""


def judged(mode: DecodingMode) -> SpeculationController:
    """A speculation controller that ended so at its load."""
    controller = SpeculationController(active_mode=mode)
    controller._decided = controller._found = True
    return controller


class Stage:
    """A planner that has found plain decoding to be faster under many sessions, and drafts under
    few."""

    def __init__(self, found: dict[int, DecodingMode]) -> None:
        self.policy: Any = SpeculationPolicy(automatic=True, ceiling_s=0.04)
        self.sessions: list[Session] = []
        self.open()
        self.known.controllers |= {load: judged(mode) for load, mode in found.items()}

    @property
    def known(self) -> Any:
        speculation_state = self.sessions[0].speculation_state
        assert speculation_state is not None
        return speculation_state.workload

    def open(self) -> Session:
        spec, kv = make_spec(plan=LONG, max_new_tokens=256), NO_BLOCKS.new_sequence()
        session = Session.create(spec, ticket=1, kv=kv, now=0.0, keeps_features=False)
        session.link_id = 1
        self.policy.add_session(session)
        self.sessions.append(session)
        return session

    def rounds(self, sessions: int, count: int) -> list[int]:
        """So many rounds of so many sessions; after each of them, how many of those that are known
        decode plainly."""
        seen = []
        for _ in range(count):
            self.policy.begin_round(sessions, 0.0)
            if self.policy.changed:
                self.policy.changed = False
                for session in self.sessions:
                    pauses = self.policy.should_pause(session)
                    if pauses != session.is_speculation_off:
                        self.policy.record_pause(session, paused=pauses)
            self.policy._loads.observe_round(RoundSample(sessions, 0, 0, 0.005))
            seen.append(sum(session.is_speculation_off for session in self.sessions))
        return seen


def test_who_was_paused_resumes_once_fewer_sessions_have_lasted() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, FEW: DecodingMode.SPECULATE})
    for _ in range(3):
        stage.open()
    assert stage.rounds(64, 40)[-1] == 4
    # A wave that ends is at every load for some rounds only.
    for sessions in (22, 5, 1):
        assert set(stage.rounds(sessions, LOWER_LOAD_ROUNDS - 1)) == {4}
    stage.rounds(64, 40)
    resuming = stage.rounds(8, LOWER_LOAD_ROUNDS + 12)
    assert resuming[LOWER_LOAD_ROUNDS + 6] == 4 and resuming[-1] == 0


def test_who_begins_in_a_burst_begins_plainly_where_its_end_is_plain() -> None:
    for most, plainly in ((DecodingMode.PLAIN, True), (DecodingMode.SPECULATE, False)):
        stage = Stage({MANY: most, FEW: DecodingMode.SPECULATE})
        stage.rounds(1, 2 * LOWER_LOAD_ROUNDS)
        stage.rounds(8, 1)
        assert stage.open().is_speculation_off is plainly
        # Who has begun with drafts goes on with them.
        assert not stage.sessions[0].is_speculation_off
        assert stage.rounds(8, LOWER_LOAD_ROUNDS + 9)[-1] == 0
        assert not stage.open().is_speculation_off


def test_sessions_that_come_and_go_by_twos_are_no_burst() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, FEW: DecodingMode.SPECULATE})
    stage.rounds(1, 2 * LOWER_LOAD_ROUNDS)
    for sessions in (2, 1, 2, 4, 2, 3) * 4:
        stage.rounds(sessions, 9)
        assert not stage.open().is_speculation_off
    assert stage.rounds(2, 1) == [0]


def test_a_trial_of_plain_rounds_holds_nobody_afterwards() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, FEW: DecodingMode.SPECULATE})
    stage.rounds(1, 2 * LOWER_LOAD_ROUNDS)
    stage.rounds(8, 1)
    stage.policy.record_pause(stage.sessions[0], paused=True)
    stage.policy.changed = True
    assert stage.rounds(8, 1) == [0]


def test_verdicts_of_other_loads_hold_nobody() -> None:
    stage = Stage({FEW: DecodingMode.SPECULATE})
    stage.known.controllers[MANY] = SpeculationController.from_other_load(
        judged(DecodingMode.PLAIN)
    )
    stage.rounds(64, 1)
    stage.policy.record_pause(stage.sessions[0], paused=True)
    stage.policy.changed = True
    assert stage.rounds(8, 2)[-1] == 0


def test_a_planner_that_decides_nothing_holds_nobody() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, FEW: DecodingMode.SPECULATE})
    stage.policy._automatic = False
    stage.rounds(8, 1)
    assert not stage.open().is_speculation_off


def test_who_is_about_to_end_stays_as_it_is() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, FEW: DecodingMode.SPECULATE})
    last = stage.open()
    assert stage.rounds(64, 40)[-1] == 2
    last.emitted = last.spec.max_new_tokens - MIN_TOKENS_LEFT + 1
    stage.rounds(8, 60)
    assert [session.is_speculation_off for session in stage.sessions] == [False, True]


def test_who_comes_after_a_rest_is_not_one_of_those_who_were_left() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, 0: DecodingMode.SPECULATE})
    stage.rounds(64, 40)
    policy, loads = stage.policy, stage.policy._loads
    policy._ended_at = 10.0
    for now, rested in ((10.1, False), (12.0, True)):
        policy.begin_round(1, now)
        assert loads.load == 0
        assert (loads.is_load_steady and loads.peak == 0) is rested


def test_a_session_that_opens_after_a_rest_finds_a_load_that_has_lasted() -> None:
    stage = Stage({MANY: DecodingMode.PLAIN, 0: DecodingMode.SPECULATE})
    stage.rounds(64, 40)
    policy, loads = stage.policy, stage.policy._loads
    policy._now = 12.0
    policy._ended_at = 10.0
    stage.open()
    assert (loads.load, loads.peak, loads.is_load_steady) == (0, 0, True)
