"""ModelRunner protocol: submits rounds to the CPU or GPU that computes them; with its output
classes.

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
    """Result of a round for one row. The KV of the row is already committed."""

    tokens: tuple[int, ...]
    """Emitted tokens; empty while a prompt is incomplete."""
    features: NDArray[np.generic] | None
    """Features of the written positions [rows, feature width], in the element type of the wire
    format; None if not kept. A later round may overwrite their memory, so they must be used before
    the next round is collected."""
    draft_nodes: int = 0
    """Number of nodes of the in-process draft that were verified; proposals are not counted."""
    logprobs: PathLogprobs | None = None
    """Logprobs of the tokens if the session asks for them."""
    is_target_only: bool = False
    """Whether the rejection rule used target-only acceptance because the draft distribution was
    missing."""
    invalid_output: bool = False
    """Whether the model computed no finite logit for the last token. That token is a placeholder,
    and the session fails."""


@dataclass(slots=True, eq=False)
class DecodeOutput:
    """Results of n decode rows as arrays; `row_outputs` returns the remaining results of single
    rows."""

    counts: NDArray[np.int64]
    """Number of tokens of each row, [n]."""
    tokens: NDArray[np.int32]
    """Tokens of all rows, one row after the other."""
    features: Callable[[], Sequence[NDArray[np.generic] | None]]
    """Returns the features of each of the n rows, see `RowOutput.features`. It is called only if a
    drafter needs them."""
    row_outputs: Callable[[Sequence[int]], Sequence[RowOutput]]
    """Returns the full results of the rows with the given indices."""
    draft_nodes: Callable[[], Sequence[int]]
    """Returns `RowOutput.draft_nodes` of each of the n rows."""
    special_rows: Callable[[], Container[int]]
    """Returns the indices of the rows that have results, apart from features, that the arrays here
    do not contain."""
    shm_features: ShmFeatures | None = None
    """The same features in shared memory that the drafter reads, if all rows have the same
    drafter."""
    invalid: NDArray[np.bool_] | None = None
    """`RowOutput.invalid_output` of each row, [n]; None if it is False for all. Rows with True are
    also in `special_rows`."""
    block: NDArray[np.generic] | None = None
    """Features of all rows [n, feature width], if some row keeps features and all rows emitted one
    token each; the results of `row_outputs` then have no features."""

    @classmethod
    def of_rows(cls, rows: Sequence[RowOutput]) -> DecodeOutput:
        """Return the output of rows whose results were computed one by one."""
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
        """Return the full results of all rows."""
        return self.row_outputs(range(len(self.counts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerOutput:
    """Results of a round in the order of the submitted rows, and the parts of its time in
    seconds."""

    prefill: list[RowOutput]
    decoded: DecodeOutput
    rows: int
    forward_s: float
    accept_s: float
    project_s: float
    """Time in the draft head's `fc` (feature projection), the only part of a separate drafter's
    head that runs in this process."""
    draft_s: float = 0.0
    """Time in the in-process drafter, as far as it can be separated from the target's forward
    pass."""


class DraftShapeTimes(NamedTuple):
    """A possible shape of in-process drafts, and the time of a round with it."""

    num_nodes: int
    """Number of nodes of a row, including the root; it identifies the shape."""
    is_tree: bool
    seconds: float
    """The device's time in seconds for the number of sessions that was passed to `draft_shapes`;
    nan if it was not measured."""


class RoundHandle(Protocol):
    """A submitted round. Only the runner that created the handle can use it."""

    @property
    def launched_at(self) -> float:
        """Time at which the round was launched, on the clock of `time.perf_counter`."""
        ...


class ModelRunner(Protocol):
    """Runs rounds of the target model. Rounds are collected in the order of their submission.

    Between `submit_round` and `collect_round` the host's view of the round's sessions (`kv.len`,
    `length`) does not change. `collect_round` advances `kv` of the sessions that have not ended,
    and the caller appends the tokens. A session may be closed while a round with it is in flight.
    Its results of this round are then dropped, and rounds with the next owner of its KV blocks or
    device slot are submitted later.
    """

    @property
    def can_run_ahead(self) -> bool:
        """Whether a round may be submitted before the one with the same sessions is collected."""
        ...

    @property
    def in_process_draft_length(self) -> int:
        """Draft length of the in-process drafter; 0 if there is none."""
        ...

    @property
    def slot_headroom(self) -> KVHeadroom:
        """Number of KV slots that rounds may write past the committed ones."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Unit of prefill: a round takes a multiple of this number of prompt tokens, or the rest of
        a prompt. 1 allows any number."""
        ...

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum number of prompt tokens of a round, where partial chunks count as full ones; None
        if there is no limit."""
        ...

    def plain_round_s(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """Return the device's time, in seconds, of a round with `rows` decoding sessions and
        `chunks` prefill chunks; None if it was not measured. `own` is whether the sessions have
        in-process drafts."""
        ...

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """Return the possible shapes of in-process drafts for a round of `rows` sessions, and the
        times of such rounds; the default shape comes first. Times are nan if they were not
        measured, as with a drafter on another device. Empty if there is no such drafter."""
        ...

    def set_draft_shape(self, num_nodes: int) -> None:
        """Set the shape of in-process drafts for the next rounds. `num_nodes`, including the root,
        identifies one of `draft_shapes`. The first of these rounds has no drafts. The default shape
        is still used for rounds of more sessions than the shape supports, and for all rounds while
        any session has a grammar."""
        ...

    def verify_round_s(self, rows: int, nodes: int) -> float | None:
        """Return the device's time, in seconds, of a round of `rows` sessions with proposals of
        `nodes` nodes each, including the root; None if it was not measured."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the device still works; read only after a failure. False is final: this process
        can run no more rounds. Must not raise."""
        ...

    def enter_thread(self) -> None:
        """Prepare the thread that runs the rounds. This thread calls it once."""
        ...

    def pin_memory(self, memory: NDArray[np.uint8]) -> bool:
        """Return whether features can be written to this memory of a shared-memory channel, and pin
        it for the device if needed."""
        ...

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """Set the function that reserves shared memory for the features of rows with one
        drafter."""
        ...

    def make_swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Return host memory of `budget_bytes` bytes for the KV of suspended sessions. `pool` is
        the target's KV pool."""
        ...

    def open_session(self, session: Session) -> None:
        """Add a new session. It has no KV and waits like a suspended session. Raises
        InvalidRequestError if it can never be served."""
        ...

    def close_session(self, session: Session) -> None:
        """Remove a session, suspended or not. Must not raise."""
        ...

    def record_new_blocks(self, session: Session) -> None:
        """Record that a session that is not suspended has more KV blocks than before. It must be
        called before the `submit_round` that needs the blocks; a round may be in flight."""
        ...

    def upload_new_blocks(self) -> None:
        """Send new blocks and new sessions to the device now, after the round in flight. Otherwise
        the next `submit_round` does so."""
        ...

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Release a session's KV blocks and its device slot. The session must be running and have
        no round in flight. With `swap`, the session's committed KV is copied to this host memory if
        it has room. Return whether it was copied; otherwise the prefix must be computed again."""
        ...

    def prefetch_session(self, session: Session) -> bool:
        """Start to copy a suspended session's KV back while rounds run. Return whether
        `resume_session` could now run without delaying a round. If False, the caller may call this
        again later, but need not."""
        ...

    def resume_session(self, session: Session) -> bool:
        """Resume a suspended session, which has reserved the blocks that it needs next. Return
        whether its KV is intact. Otherwise the caller prefills the prefix again from position 0:
        `tokens[:length - 1]`, since the last token is the root, or the whole prompt if nothing was
        emitted. Raises ResourceExhaustedError, and changes nothing, if there is no free device
        slot."""
        ...

    def has_draft_kv(self, session: Session) -> bool:
        """Return whether the in-process drafter has the draft KV of all written positions of a
        session that is not suspended."""
        ...

    def submit_round(
        self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
    ) -> RoundHandle:
        """Start a round. If it raises, no row of the round was started."""
        ...

    def is_finished(self, flight: RoundHandle) -> bool:
        """Return whether `collect_round` would return without waiting."""
        ...

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Wait for a round and return its results. If it raises, the KV of the round's sessions is
        unknown, and the caller must end these sessions."""
        ...
