"""ModelRunner protocol: submits rounds to whatever computes them; with its output classes.

H feature width.
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
    """What a round did for one row; its KV is committed."""

    tokens: tuple[int, ...]
    """What it emitted; none while a prompt is incomplete."""
    features: NDArray[np.generic] | None
    """[m, H] in the wire's element type, of the positions written; None if not kept. They may lie
    in memory that a later round writes to: to be used before the next one is settled."""
    draft_nodes: int = 0
    """Nodes of this process's in-process draft that were verified; proposals are not counted
    here."""
    logprobs: PathLogprobs | None = None
    """Of the tokens, where the session asks for them."""
    is_target_only: bool = False
    """Whether the rejection rule was judged target-only because the distribution was missing."""
    invalid_output: bool = False
    """Whether the model gave no finite logit for the last token: that is a placeholder, and the
    session fails."""


@dataclass(slots=True, eq=False)
class DecodeOutput:
    """What n rows that decode emitted, in columns; what else is to be told of a row, apart."""

    counts: NDArray[np.int64]
    """[n]: tokens of each row."""
    tokens: NDArray[np.int32]
    """Of all rows in turn."""
    features: Callable[[], Sequence[NDArray[np.generic] | None]]
    """[n]: as `RowOutput.features`; asked for if anybody is told."""
    row_outputs: Callable[[Sequence[int]], Sequence[RowOutput]]
    """Of the rows with these numbers, one by one."""
    draft_nodes: Callable[[], Sequence[int]]
    """[n]: as `RowOutput.draft_nodes`."""
    special_rows: Callable[[], Container[int]]
    """The rows of which more is to be said than the columns do, features aside."""
    shm_features: ShmFeatures | None = None
    """The same features where their drafter reads them, if it is one for all rows."""
    invalid: NDArray[np.bool_] | None = None
    """[n]: as `RowOutput.invalid_output`; None if no row is. Those rows are in `special_rows`,
    too."""
    block: NDArray[np.generic] | None = None
    """[n, H]: their features, if any keeps them and all emitted one token each; then `outcomes`
    have none."""

    @classmethod
    def of_rows(cls, rows: Sequence[RowOutput]) -> DecodeOutput:
        """Of rows that were judged one by one."""
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
        """All rows one by one."""
        return self.row_outputs(range(len(self.counts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnerOutput:
    """Outcomes in the order of the rows given, and the split of the time in seconds."""

    prefill: list[RowOutput]
    decoded: DecodeOutput
    rows: int
    forward_s: float
    accept_s: float
    project_s: float
    """In the draft head's `fc`, the part of its forward that runs here."""
    draft_s: float = 0.0
    """In this process's in-process drafter, as far as that can be told from the target's
    forward."""


class DraftShapeTimes(NamedTuple):
    """A shape that in-process drafts may have, and what a round of it takes."""

    num_nodes: int
    """Nodes of a row, the root included; it names the shape."""
    is_tree: bool
    seconds: float
    """Of the device, for the number of sessions that was asked about; nan: not measured."""


class RoundHandle(Protocol):
    """A round that was submitted; means something to the runner that made it only."""

    @property
    def launched_at(self) -> float:
        """When what computes it had it, on the clock of `time.perf_counter`."""
        ...


class ModelRunner(Protocol):
    """Runs rounds in order: they are collected in the order of their submission.

    Between `submit_round` and `collect_round` the host's view of the round's sessions (`kv.len`,
    `length`) stays as it was; `collect_round` advances `kv` of sessions that have not ended
    meanwhile, and the caller appends the tokens. A session may be closed while a round with it is
    in flight: its results of that round are dropped, and whatever takes over its KV blocks or its
    slot is submitted later.
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
        """How far rounds may write past what is committed."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of which a round takes whole numbers; 1: any number."""
        ...

    @property
    def max_prompt_tokens(self) -> int | None:
        """Most prompt tokens of a round, pieces that are not full counted as full; None: no
        bound."""
        ...

    def plain_round_s(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """Seconds of the device for a round in which so many sessions decode, with or without
        drafts of the in-process drafter, beside so many prefill chunks; None: not measured."""
        ...

    def draft_shapes(self, rows: int) -> Sequence[DraftShapeTimes]:
        """The shapes that drafts on the device may have in a round of so many sessions, and the
        seconds of such a round, the usual shape first. Seconds are nan where they were not
        measured, as with a drafter on another device. Empty without any such drafter."""
        ...

    def set_draft_shape(self, num_nodes: int) -> None:
        """Have rounds from now on verify in-process drafts of this shape, one of `draft_shapes`, by
        its nodes, the root included. The first of them has no drafts. Rounds of more sessions than
        it is for have the usual one, as have all rounds while any session is in a grammar."""
        ...

    def verify_round_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of the device for a round of so many sessions with drafts from outside, `nodes`
        each, the root included; None: not measured."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the device still works; asked after a failure only. False is final: nothing
        can be run in this process any more. Must not raise."""
        ...

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        ...

    def pin_memory(self, memory: NDArray[np.uint8]) -> bool:
        """Whether features can be put into memory that a shared-memory channel shares, from here on
        until nobody looks at it any more."""
        ...

    def set_feature_allocator(self, reserve: ShmAllocator) -> None:
        """From here on `reserve` says where to put the features of rows with one drafter."""
        ...

    def make_swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Room in host memory for the KV of suspended sessions; `pool`: the target's."""
        ...

    def open_session(self, session: Session) -> None:
        """A session begins, without KV: it waits like one that was suspended. Raises
        InvalidRequestError if it can never be served."""
        ...

    def close_session(self, session: Session) -> None:
        """A session that was opened is over, suspended or not; must not fail."""
        ...

    def record_new_blocks(self, session: Session) -> None:
        """A session that is not suspended holds more KV blocks than before; to be called before
        the submit that needs them. A round may be in flight."""
        ...

    def upload_new_blocks(self) -> None:
        """Tell the device of what has grown and who has begun, behind the round in flight; else the
        next submit does so."""
        ...

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        """Release a session's KV blocks and its slot on the device. The session must take part in
        rounds and have none in flight. With `swap`, its committed KV is copied to that host memory
        if it has room. Returns whether it was copied; if not, the prefix must be computed again."""
        ...

    def prefetch_session(self, session: Session) -> bool:
        """Begin to bring a suspended session's copy back beside the rounds; whether
        `resume_session` would make none wait for it. To be called again until it is so, or not at
        all."""
        ...

    def resume_session(self, session: Session) -> bool:
        """Let a suspended session, which has reserved the blocks that it needs next, take part in
        rounds again. Whether its KV is there, as it was; else the prefix, of which the last token
        is the root, is run like a prompt's, from 0: `tokens[:length - 1]`, or the whole prompt if
        nothing was emitted. Raises ResourceExhaustedError, and changes nothing, if there is no
        place for it."""
        ...

    def has_draft_kv(self, session: Session) -> bool:
        """Whether the in-process drafter has its KV of all that a session, which is not
        suspended, has written."""
        ...

    def submit_round(
        self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
    ) -> RoundHandle:
        """Start a round. On an exception no row of it was started."""
        ...

    def is_finished(self, flight: RoundHandle) -> bool:
        """Whether `collect_round` need not wait."""
        ...

    def collect_round(self, flight: RoundHandle) -> RunnerOutput:
        """Wait for a round. On an exception nothing that matters was committed: the caller ends
        the sessions."""
        ...
