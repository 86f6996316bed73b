"""Defines the `ModelRunner` protocol, which CPU and GPU runners implement, and its result classes.

In shapes, n is the number of decode rows; features have shape [rows, feature width].
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kv_cache import KVPool
from outrider.engine.logprobs import PathLogprobs
from outrider.engine.swap import SwapSpace
from outrider_verifier.exchange.shm_features import ShmAllocator, ShmFeatures
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.kv_headroom import KVHeadroom
from outrider_verifier.state.session import Session


class RowOutput(NamedTuple):
    """Result of a round for one session. The session's KV is already advanced."""

    tokens: tuple[int, ...]
    """Emitted tokens; empty if the round computed only a part of the prompt."""
    features: NDArray[np.generic] | None
    """Features of the positions whose KV the round wrote, [rows, feature width], in the element
    type of the wire format; None if the session keeps none. A later round may overwrite their
    memory, so they must be used before the next round is collected."""
    draft_nodes: int = 0
    """Number of nodes of the in-process draft that the round verified; 0 if it verified a
    proposal."""
    logprobs: PathLogprobs | None = None
    """Log-probabilities of the tokens; None if the session does not request any."""
    is_target_only: bool = False
    """Whether the `target-only` rule decided instead of the `rejection` rule, because the draft
    distribution was missing."""
    invalid_output: bool = False
    """Whether the target's logits for the last token were all infinite or NaN. That token is then a
    placeholder, and the session fails."""


@dataclass(slots=True, eq=False)
class DecodeOutput:
    """Results of n decode rows as arrays. Results that the arrays do not contain are read through
    `row_outputs`."""

    counts: NDArray[np.int64]
    """Number of tokens of each row, [n]."""
    tokens: NDArray[np.int32]
    """Tokens of all rows, concatenated."""
    features: Callable[[], Sequence[NDArray[np.generic] | None]]
    """Returns the features of each of the n rows, as in `RowOutput.features`. It is called only if
    a drafter needs them."""
    row_outputs: Callable[[Sequence[int]], Sequence[RowOutput]]
    """Returns the complete results of the rows with the given indices."""
    draft_nodes: Callable[[], Sequence[int]]
    """Returns `RowOutput.draft_nodes` of each of the n rows."""
    special_rows: Callable[[], Container[int]]
    """Returns the indices of the rows with results that the arrays here do not contain. Features
    are not considered."""
    shm_features: ShmFeatures | None = None
    """The same features in shared memory, from which the drafter reads them; None if the rows have
    no drafter or several."""
    invalid: NDArray[np.bool_] | None = None
    """`RowOutput.invalid_output` of each row, [n]; None if no row has invalid output. Invalid rows
    are also in `special_rows`."""
    block: NDArray[np.generic] | None = None
    """Features of all rows, [n, feature width]; None if no row keeps features, or if some row
    emitted more than one token. If it is set, the results of `row_outputs` have no features."""

    @classmethod
    def of_rows(cls, rows: Sequence[RowOutput]) -> DecodeOutput:
        """Return the output of a round whose rows were computed one by one."""
        invalid = np.array([row.invalid_output for row in rows], dtype=np.bool_)
        return cls(
            counts=np.array([len(row.tokens) for row in rows], dtype=np.int64),
            tokens=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            features=lambda: [row.features for row in rows],
            row_outputs=lambda numbers: [rows[number] for number in numbers],
            draft_nodes=lambda: [row.draft_nodes for row in rows],
            special_rows=lambda: {
                number
                for number, row in enumerate(rows)
                if row.is_target_only or row.invalid_output or row.logprobs is not None
            },
            invalid=invalid if invalid.any() else None,
        )

    def all_rows(self) -> Sequence[RowOutput]:
        """Return the complete results of all rows."""
        return self.row_outputs(range(len(self.counts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerOutput:
    """Results of a round, in the order of the submitted rows, and the durations of its stages in
    seconds."""

    prefill: list[RowOutput]
    decoded: DecodeOutput
    rows: int
    forward_s: float
    accept_s: float
    project_s: float
    """Time of the feature projection (the draft head's `fc`). With a separate drafter, no other
    part of the head runs in this process."""
    draft_s: float = 0.0
    """Time of the in-process drafter, if it was measured separately from the target's forward pass;
    else 0."""


class DraftShapeTimes(NamedTuple):
    """A shape that in-process drafts may have, and the duration of a round with it."""

    num_nodes: int
    """Number of nodes of a row, including the root. The number identifies the shape."""
    is_tree: bool
    seconds: float
    """Device time, in seconds, of a round with the number of sessions that was passed to
    `draft_shapes`; nan if it was not measured."""


class RoundHandle(Protocol):
    """A submitted round. It is valid only for the runner that created it."""

    @property
    def launched_at(self) -> float:
        """Time at which the round was launched, on the clock of `time.perf_counter`."""
        ...


class ModelRunner(Protocol):
    """Runs rounds of the target model. Rounds are collected in the order in which they were
    submitted.

    Between `submit_round` and `collect_round` the host's state of the round's sessions (`kv.len`,
    `length`) does not change. `collect_round` advances `kv` of the sessions that have not ended,
    and the caller then appends the tokens.

    A session may be closed while a round with it is in flight. The results of that round are then
    dropped for the session. Its KV blocks and device slot may be assigned to another session,
    because rounds with that session are submitted later.
    """

    @property
    def can_run_ahead(self) -> bool:
        """Whether a round may be submitted before the previous round of the same sessions is
        collected."""
        ...

    @property
    def in_process_draft_length(self) -> int:
        """Number of tokens that the in-process drafter drafts for a row; 0 if there is no such
        drafter."""
        ...

    @property
    def slot_headroom(self) -> KVHeadroom:
        """Number of KV slots that rounds may write beyond the committed ones."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Granularity of prefill in tokens. For each session, a round prefills a multiple of this
        number, or the rest of the prompt. 1 allows any number."""
        ...

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum number of prompt tokens of a round; None if there is no limit. Partly filled
        chunks count as full."""
        ...

    def plain_round_s(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """Return the device time, in seconds, of a round without proposals, with `rows` decoding
        sessions and `chunks` prefill chunks; None if it was not measured. `own` is whether the
        sessions have in-process drafts."""
        ...

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """Return the draft shapes that a round of `rows` sessions may have, each with the duration
        of such a round; the default shape comes first. The shapes are those of the in-process
        drafter or of a drafter on another GPU; the result is empty if there is neither. A duration
        is nan if it was not measured, which is always so for a drafter on another GPU."""
        ...

    def set_draft_shape(self, num_nodes: int) -> None:
        """Set the shape of in-process drafts for the next rounds to the entry of `draft_shapes`
        with this `num_nodes`. The default shape is still used in rounds with more sessions than the
        shape supports, and in all rounds while any session has a grammar. The first round after a
        change may have no drafts."""
        ...

    def verify_round_s(self, rows: int, nodes: int) -> float | None:
        """Return the device time, in seconds, of a round of `rows` sessions that verify proposals
        of `nodes` nodes each, including the root; None if it was not measured."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the device still works. This is read only after a failure. False is final: this
        process cannot run another round. Must not raise."""
        ...

    def enter_thread(self) -> None:
        """Prepare the calling thread to run rounds. That thread must call this once."""
        ...

    def pin_memory(self, memory: NDArray[np.uint8]) -> bool:
        """Prepare the memory of a shared-memory channel for feature transfers, pinning it if the
        device needs that. Return whether the runner can write features to it."""
        ...

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """Set the function that reserves shared memory for features. It is used for rows that all
        have the same drafter."""
        ...

    def make_swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Return host memory of `budget_bytes` bytes for the KV of suspended sessions. `pool` is
        the target's KV pool."""
        ...

    def open_session(self, session: Session) -> None:
        """Add a new session. It has no KV, and must be resumed like a suspended session before it
        is in a round. Raises InvalidRequestError if the session can never be served."""
        ...

    def close_session(self, session: Session) -> None:
        """Remove a session, whether or not it is suspended. Must not raise."""
        ...

    def record_new_blocks(self, session: Session) -> None:
        """Record that a session has received more KV blocks. This must be called before the
        `submit_round` that needs the blocks; another round may be in flight. The session must not
        be suspended."""
        ...

    def upload_new_blocks(self) -> None:
        """Queue the upload of new blocks and new sessions to the device behind the round in flight.
        Without this call, the next `submit_round` uploads them."""
        ...

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Release a session's KV blocks and device slot. The session must be running and have no
        round in flight. If `swap` is given and has enough free memory, the committed KV is copied
        to it. Return whether the KV was copied; if not, the prefix must be computed again."""
        ...

    def prefetch_session(self, session: Session) -> bool:
        """Start to copy a suspended session's KV back to the device while rounds run. Return
        whether `resume_session` would now run without delaying a round. After False the caller may
        call this again."""
        ...

    def resume_session(self, session: Session) -> bool:
        """Resume a suspended session, whose KV blocks for the next round are already reserved.
        Return whether its KV is intact. If it is not, the caller must prefill from position 0:
        `tokens[:length - 1]`, because the last token is the root, or the whole prompt if nothing
        was emitted. If no device slot is free, raises ResourceExhaustedError and changes
        nothing."""
        ...

    def has_draft_kv(self, session: Session) -> bool:
        """Return whether the in-process drafter has the draft KV of all written positions of a
        session. The session must not be suspended."""
        ...

    def submit_round(
        self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
    ) -> RoundHandle:
        """Submit a round without waiting for it. If this raises, the round was not started."""
        ...

    def is_finished(self, flight: RoundHandle) -> bool:
        """Return whether `collect_round` would return without waiting."""
        ...

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Wait for a round and return its results. If this raises, the KV of the round's sessions
        is in an unknown state, and the caller must end these sessions."""
        ...
