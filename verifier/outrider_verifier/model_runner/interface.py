"""What the verifier drives: rounds on whatever computes them, and what they gave.

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
from outrider_verifier.exchange.shm_features import Placed, Reserve
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.kv_headroom import Slack
from outrider_verifier.state.session import Session


class RowOutcome(NamedTuple):
    """What a round did for one row; its K/V is committed."""

    tokens: tuple[int, ...]
    """What it emitted; none while a prompt is incomplete."""
    features: NDArray[np.generic] | None
    """[m, H] in the wire's element type, of the positions written; None if not kept. They may lie
    in memory that a later round writes to: to be used before the next one is settled."""
    drafted: int = 0
    """Nodes of this process's own draft that were verified; proposals are not counted here."""
    logprobs: PathLogprobs | None = None
    """Of the tokens, where the session asks for them."""
    target_only: bool = False
    """Whether the rejection rule was judged target-only because the law was missing."""
    invalid_output: bool = False
    """Whether the model gave no finite logit for the last token: that is a placeholder, and the
    session fails."""


@dataclass(slots=True, eq=False)
class Decoded:
    """What n rows that decode emitted, in columns; what else is to be told of a row, apart."""

    counts: NDArray[np.int64]
    """[n]: tokens of each row."""
    tokens: NDArray[np.int32]
    """Of all rows in turn."""
    features: Callable[[], Sequence[NDArray[np.generic] | None]]
    """[n]: as `RowOutcome.features`; asked for if anybody is told."""
    outcomes: Callable[[Sequence[int]], Sequence[RowOutcome]]
    """Of the rows with these numbers, one by one."""
    drafted: Callable[[], Sequence[int]]
    """[n]: as `RowOutcome.drafted`."""
    apart: Callable[[], Container[int]]
    """The rows of which more is to be said than the columns do, features aside."""
    placed: Placed | None = None
    """The same features where their drafter reads them, if it is one for all rows."""
    invalid: NDArray[np.bool_] | None = None
    """[n]: as `RowOutcome.invalid_output`; None if no row is. Those rows are in `apart`, too."""
    block: NDArray[np.generic] | None = None
    """[n, H]: their features, if any keeps them and all emitted one token each; then `outcomes`
    have none."""

    @classmethod
    def of(cls, rows: Sequence[RowOutcome]) -> Decoded:
        """Of rows that were judged one by one."""
        invalid = np.array([row.invalid_output for row in rows], dtype=np.bool_)
        return cls(
            counts=np.array([len(row.tokens) for row in rows], dtype=np.int64),
            tokens=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            features=lambda: [row.features for row in rows],
            outcomes=lambda numbers: [rows[number] for number in numbers],
            drafted=lambda: [row.drafted for row in rows],
            apart=lambda: {
                number
                for number, row in enumerate(rows)
                if row.target_only or row.invalid_output or row.logprobs is not None
            },
            invalid=invalid if invalid.any() else None,
        )

    def rows(self) -> Sequence[RowOutcome]:
        """All rows one by one."""
        return self.outcomes(range(len(self.counts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundOutcome:
    """Outcomes in the order of the rows given, and the split of the time in seconds."""

    prefill: list[RowOutcome]
    decoded: Decoded
    rows: int
    forward_s: float
    accept_s: float
    project_s: float
    """In the draft head's `fc`, the part of its forward that runs here."""
    draft_s: float = 0.0
    """In this process's own head, as far as that can be told from the target's forward."""


class Flight(Protocol):
    """A round that was submitted; means something to the runner that made it only."""

    @property
    def launched_at(self) -> float:
        """When what computes it had it, on the clock of `time.perf_counter`."""
        ...


class RoundRunner(Protocol):
    """Runs rounds, in order: flights are collected in the order of their submission.

    Between `submit` and `collect` of a round the host's view of its sessions (`kv.len`, `length`)
    stays that of before; `collect` moves `kv` on, for sessions that have not ended meanwhile, and
    the caller appends the tokens. A session may be closed while a round with it is in flight: what
    that round computes for it is dropped, and whatever takes over its K/V blocks or its slot is
    submitted later.
    """

    @property
    def run_ahead(self) -> bool:
        """Whether a round may be submitted before the one with the same sessions is collected."""
        ...

    @property
    def drafts_itself(self) -> int:
        """Draft length of the head in this process; 0 if there is none."""
        ...

    @property
    def slack(self) -> Slack:
        """How far rounds may write past what is committed."""
        ...

    @property
    def piece_tokens(self) -> int:
        """Prompt tokens of which a round takes whole numbers; 1: any number."""
        ...

    @property
    def most_prompt_tokens(self) -> int | None:
        """Most prompt tokens of a round, pieces that are not full counted as full; None: no
        bound."""
        ...

    def prompt_tokens_beside(self, rows: int, crowded: bool = False) -> int | None:
        """The same for a round in which `rows` sessions decode; `crowded`: many prompts wait."""
        ...

    def round_s(
        self, rows: int, *, own: bool, pieces: int = 0, featured: bool = False
    ) -> float | None:
        """Seconds of the device for a round in which so many sessions decode, with or without
        drafts of the head in this process, beside so many pieces of prompts; `featured`: features
        of it are kept. None: not measured."""
        ...

    def verify_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of the device for a round of so many sessions with drafts from outside, `nodes`
        each, the root included; None: not measured."""
        ...

    @property
    def usable(self) -> bool:
        """Whether the device still works; asked after a failure only. False is final: nothing
        can be run in this process any more. Must not raise."""
        ...

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """Whether features can be put into memory that a lane shares, from here on until nobody
        looks at it any more."""
        ...

    def land_in(self, reserve: Reserve) -> None:
        """From here on `reserve` says where to put the features of rows with one drafter."""
        ...

    def swap_space(self, budget_bytes: int, pool: KVPool) -> SwapSpace:
        """Room in host memory for the K/V of suspended sessions; `pool`: the target's."""
        ...

    def open(self, session: Session) -> None:
        """A session begins, without K/V: it waits like one that was suspended. Raises
        InvalidRequestError if it can never be served."""
        ...

    def close(self, session: Session) -> None:
        """A session that was opened is over, suspended or not; must not fail."""
        ...

    def grown(self, session: Session) -> None:
        """A session that is not suspended holds more K/V blocks than before; to be called before
        the submit that needs them. A round may be in flight."""
        ...

    def tell_grown(self) -> None:
        """Tell the device of what has grown and who has begun, behind the round in flight; else the
        next submit does so."""
        ...

    def suspend(self, session: Session, swap: SwapSpace | None) -> bool:
        """Take a session's K/V blocks and its place on the device; it takes part in rounds, and
        none with it is in flight. With `swap` what is committed is copied there if the budget has
        room. Whether that was done: else the prefix is to be run again."""
        ...

    def fetch(self, session: Session) -> bool:
        """Begin to bring a suspended session's copy back beside the rounds; whether `resume` would
        make none wait for it. To be called again until it is so, or not at all."""
        ...

    def resume(self, session: Session) -> bool:
        """Let a suspended session, which has reserved the blocks that it needs next, take part in
        rounds again. Whether its K/V is there, as it was; else the prefix, of which the last token
        is the root, is run like a prompt's, from 0: `tokens[:length - 1]`, or the whole prompt if
        nothing was emitted. Raises ResourceExhaustedError, and changes nothing, if there is no
        place for it."""
        ...

    def drafted(self, session: Session) -> bool:
        """Whether the head in this process has its K/V of all that a session, which is not
        suspended, has written."""
        ...

    def submit(self, prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]) -> Flight:
        """Start a round. On an exception no row of it was started."""
        ...

    def landed(self, flight: Flight) -> bool:
        """Whether `collect` need not wait."""
        ...

    def collect(self, flight: Flight) -> RoundOutcome:
        """Wait for a round. On an exception nothing that matters was committed: the caller ends
        the sessions."""
        ...
