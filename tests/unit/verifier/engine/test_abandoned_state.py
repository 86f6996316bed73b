"""State that cannot even be dropped cleanly is left behind, and touches nobody who comes after."""

from __future__ import annotations

from typing import Any

import numpy as np
from outrider_verifier.config import VerifierConfig
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.exchange.feature_store import MAX_SINGLE_ROWS
from outrider_verifier.server.service import VerifierService
from outrider_verifier.state.commands import OpenSession
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

from tests.fakes.target import FakeProjection, FakeTarget
from tests.unit.verifier.harness import make_spec


def _opened(core: EngineCore, ticket: int, name: str) -> Session:
    spec = make_spec(name)
    nobody: Any = None
    core.handle_command(OpenSession(ticket, spec, nobody), 0.0)
    return core.sessions[spec.session_id]


def test_what_a_round_still_has_of_an_abandoned_session_is_nobodys() -> None:
    target = FakeTarget(num_blocks=64)
    config = VerifierConfig(model="fake", max_tree_nodes=16)
    service = VerifierService(
        config, target, FakeProjection(), pool=target.pool, max_context_len=4096
    )
    core, store = service.core, service.core.store
    assert store is not None
    left = _opened(core, 1, "left")
    before = left.handle
    core.drop_all_sessions()
    assert left.phase is ENDED and not core.sessions
    next_one = _opened(core, 2, "next")
    assert next_one.handle == before and store.is_complete(next_one.handle)
    rows = np.ones((MAX_SINGLE_ROWS, FakeProjection().hidden_size), np.float32)
    store.append_each([left.handle] * MAX_SINGLE_ROWS, rows)
    store.append(left.handle, rows)
    assert store.used_bytes == 0
