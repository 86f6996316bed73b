"""Cost of swapping one long session out and in while other sessions decode.

The benchmark submits the rounds itself. It submits each round before it reads the results of the
previous one, as the verifier does.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Final

from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.state.session import Session

from outrider.engine.swap import SwapSpace
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from outrider_bench.gpu.support.benchmark_context import Bench, show, simulated
from outrider_bench.gpu.support.load_driver import random_prompts
from outrider_bench.gpu.support.services import (
    FUSED,
    PLAIN,
    LoadedModels,
    ServingSetup,
    make_runner,
    release_runner,
    verifier_config,
)

OTHERS: Final = 32
SWAPPED_TOKENS: Final = 1024
WARM_ROUNDS: Final = 8
AWAY_ROUNDS: Final = 2
"""Number of rounds between a swap out and the beginning of the swap in."""
REPEATS: Final = 3
"""Number of measurements with swaps. There is a measurement without swaps before and after each."""


def run(bench: Bench) -> dict[str, object]:
    """Measure rounds without drafts, and rounds with an in-process drafter. Return the result for
    the JSON file."""
    models = bench.random()
    found = {
        name: measure_placement(bench, models, name) for name in bench.placements(PLAIN, FUSED)
    }
    headers = ("", "round ms", "out ms", "in ms", "host out ms", "host in ms", "a swap costs ms")
    rows = [
        (
            name,
            facts["round_ms"],
            facts["out_ms"],
            facts["back_ms"],
            facts["host_out_ms"],
            facts["host_back_ms"],
            facts["cost_ms"],
        )
        for name, facts in found.items()
    ]
    show(f"swap of one session, {models.name}", headers, rows)
    return bench.result("swap", models, by_placement=found)


def measure_placement(bench: Bench, models: LoadedModels, placement: str) -> dict[str, Any]:
    """Return the figures of one placement. Rounds with swaps, one swap directly after another, and
    rounds without swaps are measured in alternation."""
    own = placement == FUSED
    length, others = bench.drafts[0], min(OTHERS, max(bench.batches))
    setup = ServingSetup(
        placement=placement,
        draft_length=length,
        simulated=simulated(length) if own else "",
        max_sessions=others + 1,
        max_tokens=max(SWAPPED_TOKENS, bench.max_tokens) + WARM_ROUNDS,
        cuda_graphs=bench.args.graphs,
    )
    runner, _ = make_runner(models, setup, verifier_config(models, setup))
    try:
        return _measure(bench, models, runner, setup, others)
    finally:
        release_runner(runner)


def _measure(
    bench: Bench, models: LoadedModels, runner: Any, setup: ServingSetup, others: int
) -> dict[str, Any]:
    vocab, pool = models.target.vocab_size, models.target.pool
    runner.enter_thread()
    rounds = RoundDriver(runner)
    long = min(SWAPPED_TOKENS, pool.block_tokens * pool.free_blocks // 2)
    per_round = length_of(setup)
    count = int((bench.output_tokens - 2 * WARM_ROUNDS) / per_round / (2 * REPEATS + 1))
    prompts = random_prompts(others, bench.prompt_tokens, vocab)
    swapped = _open(runner, pool, 0, random_prompts(1, long, vocab)[0], bench.output_tokens)
    rounds.prefill([swapped])
    sessions = [
        _open(runner, pool, number + 1, prompt, bench.output_tokens)
        for number, prompt in enumerate(prompts)
    ]
    rounds.prefill(sessions)
    rounds.run(sessions, WARM_ROUNDS)
    space = runner.make_swap_space(2 * swapped.kv.num_blocks * _block_bytes(runner, pool), pool)
    swaps = SessionSwapper(runner, space, swapped)
    rounds.run(sessions, WARM_ROUNDS, swaps)
    swaps.reset()
    calm, busy = [rounds.run(sessions, count)], []
    for _ in range(REPEATS):
        busy.append(rounds.run(sessions, count, swaps))
        calm.append(rounds.run(sessions, count))
    kept = swapped.kv.len
    for session in (swapped, *sessions):
        session.kv.release()
        runner.close_session(session)
    return _facts(space, swaps, calm, busy, others=others, tokens=kept)


def length_of(setup: ServingSetup) -> float:
    """Return the mean number of tokens that a session emits per round: the simulated number, or
    1."""
    return float(setup.simulated) if setup.simulated else 1.0


def _block_bytes(runner: Any, pool: Any) -> int:
    return int(runner.make_swap_space(0, pool).block_bytes)


def _facts(
    space: SwapSpace,
    swaps: SessionSwapper,
    calm: list[RoundSpan],
    busy: list[RoundSpan],
    *,
    others: int,
    tokens: int,
) -> dict[str, Any]:
    out, back = space.copy_times_s(tokens)
    plain_ms = statistics.median(span.round_ms for span in calm)
    extra_ms = sum(span.seconds * 1e3 - plain_ms * span.rounds for span in busy)
    plain = statistics.median(span.tokens_s for span in calm)
    beside = statistics.median(span.tokens_s for span in busy)
    cost = extra_ms / max(1, swaps.done)

    def middle(values: list[float]) -> float:
        return round(1e3 * statistics.median(values), 3) if values else 0.0

    return {
        "others": others,
        "swapped_tokens": tokens,
        "swapped_bytes": -(-tokens // 16) * space.block_bytes,
        "swaps": swaps.done,
        "round_ms": round(plain_ms, 4),
        "out_ms": round(1e3 * out, 3),
        "back_ms": round(1e3 * back, 3),
        "host_out_ms": middle(swaps.out_s),
        "fetch_ms": middle(swaps.fetch_s),
        "host_back_ms": middle(swaps.back_s),
        "cost_ms": round(cost, 3),
        "tokens_s_without": round(plain, 1),
        "tokens_s_beside_swaps_one_after_another": round(beside, 1),
        "share_lost_one_after_another": round(1.0 - beside / plain, 4),
        "share_lost_at_one_a_second": round(cost / 1e3, 5),
    }


def _open(runner: Any, pool: Any, number: int, prompt: list[int], max_new: int) -> Session:
    length = runner.in_process_draft_length
    plan = (
        SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=length)
        if length
        else SpeculationPlan()
    )
    spec = SessionSpec(
        session_id=SessionId(f"s{number}"),
        epoch=0,
        token_ids=tuple(prompt),
        prompt_len=len(prompt),
        max_new_tokens=4 * max_new,
        stop_token_ids=(),
        sampling=SamplingParams(),
        plan=plan,
    )
    session = Session.create(
        spec,
        ticket=number,
        kv=pool.new_sequence(),
        now=0.0,
        keeps_features=False,
        in_process_draft_length=length,
    )
    reserved = session.kv.reserve(len(prompt) + runner.slot_headroom.slots_beyond(session))
    assert reserved, "the pool is too small"
    runner.open_session(session)
    kept = runner.resume_session(session)
    session.mark_admitted(0.0, kept=kept)
    return session


@dataclass(slots=True)
class RoundSpan:
    """Number, duration and emitted tokens of consecutive rounds."""

    rounds: int
    seconds: float
    tokens: int

    @property
    def round_ms(self) -> float:
        """Mean milliseconds per round."""
        return 1e3 * self.seconds / self.rounds

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all sessions."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class SessionSwapper:
    """Swaps one session out and in repeatedly, and records the times."""

    runner: Any
    space: SwapSpace
    session: Session
    done: int = 0
    out_s: list[float] = field(default_factory=list)
    """Seconds that the host spent in each swap out."""
    back_s: list[float] = field(default_factory=list)
    """Seconds that the host spent to resume the session after each swap in."""
    fetch_s: list[float] = field(default_factory=list)
    """Seconds from the start of each copy back to the device until it was seen to be complete
    between two rounds."""
    _away: int = -1
    """Number of rounds since the session was swapped out; -1 while it is on the device."""
    _asked: float = 0.0

    def reset(self) -> None:
        """Discard the measurements so far."""
        self.done = 0
        for times in (self.out_s, self.back_s, self.fetch_s):
            times.clear()

    def step(self) -> None:
        """Swap the session out or in if it is time for that. Call this between two rounds."""
        began = time.perf_counter()
        if self._away < 0:
            self.space.copy_times_s(0)
            kept = self.runner.suspend_session(self.session, self.space)
            assert kept, "no room to swap"
            self.out_s.append(time.perf_counter() - began)
            self._away = 0
            return
        self._away += 1
        if self._away < AWAY_ROUNDS:
            return
        self._asked = self._asked or began
        if self.runner.prefetch_session(self.session):
            self.fetch_s.append(time.perf_counter() - self._asked)
            self._back()

    def finish(self) -> None:
        """Swap the session in if it is swapped out."""
        if self._away >= 0:
            self._back()

    def _back(self) -> None:
        began = time.perf_counter()
        self.session.kv.reserve(self.session.length)
        self.runner.resume_session(self.session)
        self.back_s.append(time.perf_counter() - began)
        self._away, self._asked = -1, 0.0
        self.done += 1


class RoundDriver:
    """Runs rounds with a model runner. It submits each round before it reads the results of the
    previous one."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def prefill(self, sessions: list[Session]) -> None:
        """Compute the prompts of the sessions."""
        most = self._runner.max_prompt_tokens
        for session in sessions:
            while session.prefill_left:
                row = PrefillRow.from_next_tokens(session, min(most, session.prefill_left))
                flight = self._runner.submit_round([row], [])
                session.mark_submitted(row.end)
                result = self._runner.collect_round(flight).prefill[0]
                if result.tokens:
                    session.commit_tokens(result.tokens, 0.0)

    def run(
        self, sessions: list[Session], rounds: int, swaps: SessionSwapper | None = None
    ) -> RoundSpan:
        """Run `rounds` rounds of all sessions and read all their results. `swaps` is called between
        rounds."""
        tokens, flight = 0, None
        began = time.perf_counter()
        for _ in range(max(1, rounds)):
            if swaps is not None:
                swaps.step()
            following = self._submit(sessions)
            if flight is not None:
                tokens += self._settle(flight, sessions)
            flight = following
        if flight is not None:
            tokens += self._settle(flight, sessions)
        seconds = time.perf_counter() - began
        if swaps is not None:
            swaps.finish()
        return RoundSpan(max(1, rounds), seconds, tokens)

    def _submit(self, sessions: list[Session]) -> Any:
        for session in sessions:
            need = session.kv.len + self._runner.slot_headroom.slots_beyond(session)
            if session.kv.capacity < need:
                grown = session.kv.reserve(need)
                assert grown, "the pool is too small"
                self._runner.record_new_blocks(session)
        rows = [
            VerifyRow(session, in_process_depth=session.in_process_depth) for session in sessions
        ]
        return self._runner.submit_round([], rows)

    def _settle(self, flight: Any, sessions: list[Session]) -> int:
        tokens = 0
        outcome = self._runner.collect_round(flight)
        for session, row in zip(sessions, outcome.decoded.all_rows(), strict=True):
            session.commit_tokens(row.tokens, 0.0)
            tokens += len(row.tokens)
        return tokens
