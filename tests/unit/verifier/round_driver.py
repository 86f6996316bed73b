"""Rounds by hand, with KV blocks on demand: sessions grow, are suspended and resumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.batch import PrefillRow, VerifyDraft, VerifyRow
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.model_runner.interface import ModelRunner, RoundHandle
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import PREFILLING

from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.kv_cache import KVPool
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.engine.swap import SwapSpace
from outrider.wire.messages import SessionSpec

PIECE = 16
MAX_NODES = 12


def host_runner(target_dir: Path, *, blocks: int = 64, **_: Any) -> tuple[ModelRunner, KVPool]:
    """The host's engine on the tiny target, with so many blocks of 16 tokens."""
    target = load_target(target_dir, kv_tokens=16 * blocks, packed=False)
    return CpuModelRunner(target, None, max_nodes=MAX_NODES), target.pool


def device_runner(
    target_dir: Path,
    head_dir: Path | None = None,
    *,
    blocks: int = 64,
    device: str = "cpu",
    weights: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[ModelRunner, KVPool]:
    """The device's engine, with an in-process drafter if there is one."""
    place: dict[str, Any] = {"device": device, "dtype": weights}
    target = load_target(target_dir, kv_tokens=16 * blocks, packed=False, **place)
    projection = head = None
    if head_dir is not None:
        projection = load_feature_projection(head_dir, num_target_layers=6, **place)
        head = load_head(
            head_dir,
            embedding=target.embedding,
            num_target_layers=6,
            make_linear=PlainLinear,
            **place,
        )
        settings = {"placement": "fused", "feature_head": str(head_dir), **settings}
    settings = {"max_sessions": 4, "draft_tree_nodes": 0, **settings}
    config = VerifierConfig(model="tiny", device=device, max_tree_nodes=MAX_NODES, **settings)
    return GpuModelRunner.build(config, target, projection, head), target.pool


@dataclass(eq=False)
class Driver:
    """Runs rounds of its sessions, all of them at once."""

    runner: ModelRunner
    pool: KVPool
    swap: SwapSpace | None = None
    draft_length: int = 0
    """Drafts a round of a drafter on another device; 0: there is none."""
    ahead: bool = False
    """Whether a round is submitted before the one before it is collected."""
    sessions: list[Session] = field(default_factory=list)
    waiting: list[Session] = field(default_factory=list)
    whole: bool = False
    """Whether sessions hold at once all the blocks that they may ever need."""
    draft: Callable[[Session], VerifyDraft | None] = lambda session: None
    """Drafts from outside."""
    counts: list[int] = field(default_factory=list)
    """Tokens that each row emitted, round after round."""
    drafted: dict[int, list[int]] = field(default_factory=dict)
    """Nodes of in-process drafts that each round verified, by ticket."""
    target_only: dict[int, list[bool]] = field(default_factory=dict)
    """Whether each round judged a draft target-only because its distribution was missing, by
    ticket."""
    gone: set[bool] = field(default_factory=set)
    """Whether sessions were suspended with a copy, and without."""
    flights: deque[tuple[RoundHandle, list[PrefillRow], list[VerifyRow]]] = field(
        default_factory=deque
    )

    def open(self, spec: SessionSpec) -> Session:
        """A session that waits."""
        session = Session.create(
            spec,
            ticket=len(self.sessions) + len(self.waiting),
            kv=self.pool.new_sequence(),
            now=0.0,
            keeps_features=False,
            in_process_draft_length=self.runner.in_process_draft_length or self.draft_length,
        )
        self.runner.open_session(session)
        self.waiting.append(session)
        return session

    def resume(self, session: Session) -> bool:
        """With blocks for what is written; more come as it goes on."""
        assert session.kv.reserve(max(1, session.length - 1))
        kept = self.runner.resume_session(session)
        session.mark_admitted(0.0, kept=kept)
        self.waiting.remove(session)
        self.sessions.append(session)
        return kept

    def suspend(self, session: Session, *, swap: bool) -> bool:
        """When all that is in flight is settled."""
        self.settle_all()
        self.sessions.remove(session)
        self.waiting.append(session)
        kept = self.runner.suspend_session(session, self.swap if swap else None)
        assert session.kv.num_blocks == 0
        session.mark_preempted(0.0, swapped=kept)
        self.gone.add(kept)
        return kept

    def step(self) -> None:
        """One round of all that go on."""
        prefill: list[PrefillRow] = []
        verify: list[VerifyRow] = []
        under_way = [row.session for _, _, rows in self.flights for row in rows]
        for session in self.sessions:
            # Every round emits a token at least.
            if session.remaining - under_way.count(session) <= 0:
                continue
            nodes = 0
            if session.phase is PREFILLING:
                row = PrefillRow.from_next_tokens(session, min(PIECE, session.prefill_left))
                prefill.append(row)
                session.mark_submitted(row.end)
            else:
                draft = self.draft(session)
                verify.append(
                    VerifyRow(session, draft=draft, in_process_depth=session.in_process_depth)
                )
                nodes = verify[-1].nodes
            self._reserve(session, nodes)
        if prefill or verify:
            self.flights.append((self.runner.submit_round(prefill, verify), prefill, verify))
        while len(self.flights) > int(self.ahead and bool(prefill or verify)):
            self.settle()

    def _reserve(self, session: Session, nodes: int) -> None:
        """No more than the next round may write."""
        base = session.max_len if self.whole else max(session.kv.len, session.prefill.sent)
        slack = self.runner.slot_headroom
        need = base + (slack.max_slots if self.whole else slack.slots_beyond(session, nodes))
        if session.kv.blocks_missing(need):
            assert session.kv.reserve(need)
            self.runner.record_new_blocks(session)

    def settle(self) -> None:
        """Collect the oldest round."""
        flight, prefill, verify = self.flights.popleft()
        outcome = self.runner.collect_round(flight)
        results = [*outcome.prefill, *outcome.decoded.all_rows()]
        for row, result in zip([*prefill, *verify], results, strict=True):
            session = row.session
            if result.tokens:
                self.counts.append(len(result.tokens))
                self.drafted.setdefault(session.ticket, []).append(result.draft_nodes)
                self.target_only.setdefault(session.ticket, []).append(result.is_target_only)
                session.commit_tokens(result.tokens[: session.remaining], 0.0)

    def settle_all(self) -> None:
        """Nothing is in flight any more."""
        while self.flights:
            self.settle()

    @property
    def over(self) -> bool:
        """Whether every answer is complete."""
        return all(session.remaining == 0 for session in [*self.sessions, *self.waiting])

    def close(self) -> None:
        """End all sessions; nothing may be held."""
        self.settle_all()
        for session in [*self.sessions, *self.waiting]:
            session.kv.release()
            session.mark_ended()
            self.runner.close_session(session)
        self.sessions.clear()
        self.waiting.clear()


def texts(
    driver: Driver,
    specs: Sequence[SessionSpec],
    before: Callable[[Driver, int], None] = lambda driver, step: None,
) -> list[list[int]]:
    """Serve all; `before` may disturb any round, by its number."""
    free = driver.pool.free_blocks
    sessions = [driver.open(spec) for spec in specs]
    for session in sessions:
        driver.resume(session)
    step = 0
    while not driver.over:
        before(driver, step)
        driver.step()
        step += 1
        assert step < 500
    driver.close()
    assert driver.pool.free_blocks == free
    assert driver.swap is None or driver.swap.used_bytes == 0
    return [s.tokens[len(s.spec.token_ids) : s.length].tolist() for s in sessions]
