"""What a round emits as messages, one for each router (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.engine.logprobs import PathLogprobs
from outrider.wire.messages import EventLogprobs, SessionEvents
from outrider.wire.rounds import owned_indices
from outrider_verifier.state.effects import EventBatch


def split_by_router(
    batch: EventBatch, routers: NDArray[np.int64], handles: NDArray[np.uint32]
) -> Iterator[tuple[int, SessionEvents]]:
    """The events of each router, in order. `routers`: [n] whose each event is, negative: nobody's;
    `handles`: [n] of their sessions."""
    order = np.argsort(routers, kind="stable")
    owners = routers[order]
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    columns, tokens = batch.columns(), np.array(batch.tokens, np.int32)
    if len(edges) > 2:
        tokens = tokens[owned_indices(columns[2], order)]
        columns, handles = columns[:, order], handles[order]
    _, round_ids, counts, reasons, flags, proposed, accepted = columns
    round_ids, counts = round_ids.astype(np.uint32), counts.astype(np.uint32)
    reasons, flags = reasons.astype(np.uint8), flags.astype(np.uint8)
    proposed, accepted = proposed.astype(np.uint16), accepted.astype(np.uint16)
    ends = [0, *counts.cumsum().tolist()]
    for first, end in pairwise(edges):
        if first == end or owners[first] < 0:
            continue
        mine = slice(first, end)
        yield (
            int(owners[first]),
            SessionEvents(
                handles=handles[mine],
                round_ids=round_ids[mine],
                counts=counts[mine],
                tokens=tokens[ends[first] : ends[end]],
                finish_reasons=reasons[mine],
                flags=flags[mine],
                proposed=proposed[mine],
                accepted=accepted[mine],
                logprobs=_logprobs(batch.logprobs, order[mine]) if batch.logprobs else None,
            ),
        )


def _logprobs(told: dict[int, PathLogprobs], rows: NDArray[np.intp]) -> EventLogprobs | None:
    """The columns of these rows; None where none of them has any."""
    mine = [told.get(row) for row in rows.tolist()]
    entries = [entry for entry in mine if entry is not None]
    if not entries:
        return None
    return EventLogprobs(
        widths=np.array([0 if e is None else e.values.shape[1] for e in mine], np.uint8),
        values=np.concatenate([entry.values.ravel() for entry in entries]),
        top_ids=np.concatenate([entry.top_ids.ravel() for entry in entries]),
    )
