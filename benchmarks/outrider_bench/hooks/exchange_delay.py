# mypy: disable-error-code="no-untyped-call"
"""Hook of a drafter that answers the rounds of a device exchange late.

    --hook outrider_bench.hooks.exchange_delay:delay_ms=50

On a CPU the drafting thread sleeps before each round. On a GPU a kernel that waits on one
multiprocessor runs before each round, in the same stream.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from outrider_drafter.hooks import DrafterHooks

from outrider.engine.device.exchange.draft_replica import DraftReplica, ReplicaRound
from outrider.errors import InvalidRequestError

MAX_DELAY_MS: Final = 10_000.0
_CYCLES_PER_MS: Final = 1_500_000
"""Approximate clock cycles per millisecond of the GPUs that this hook is used with."""


def install(hooks: DrafterHooks, *, delay_ms: float) -> None:
    """Answer each round `delay_ms` later. Raises InvalidRequestError for a delay that is out of
    range."""
    if not 0.0 < delay_ms <= MAX_DELAY_MS:
        raise InvalidRequestError(f"delay_ms must be in (0, {MAX_DELAY_MS:g}], got {delay_ms:g}")
    launch_round = DraftReplica.launch_round

    def launch_late(replica: DraftReplica, announced: ReplicaRound) -> None:
        if replica.state.words.is_cuda:
            torch.cuda._sleep(int(delay_ms * _CYCLES_PER_MS))
        else:
            time.sleep(delay_ms / 1e3)
        launch_round(replica, announced)

    DraftReplica.launch_round = launch_late  # type: ignore[method-assign,assignment]
    hooks.handicaps.append(f"exchanges {delay_ms:g} ms late")
