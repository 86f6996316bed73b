"""FollowedSession: a drafter's state of one session; and the checks of its announcement.

Tokens t_0 .. t_n (t_n is the root) and features f_0 .. f_{n-1}. During a chunked prefill the
features may cover every known token; once a draft is wanted they end one before the root. Values
that change with every round are in the columns of a `SessionTable`; a `FollowedSession` is one row
of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import Constraint
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.token_limits import TokenLimits
from outrider.wire.messages import SessionStart

if TYPE_CHECKING:
    from outrider_drafter.state.session_table import SessionTable


class SessionKey(NamedTuple):
    """A session is known under the connection that announced it; a reconnect starts it afresh."""

    connection: int
    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLimits:
    """What a verdict may contain."""

    vocab_size: int
    feature_size: int
    """Width H of a feature row; 0 if this drafter takes none."""
    max_context: int
    """Longest session in tokens that is followed at all."""


class TokenRow:
    """A session's tokens, read as a view."""

    __slots__ = ("_slot", "_table")

    def __init__(self, table: SessionTable, slot: int) -> None:
        self._table, self._slot = table, slot

    def __len__(self) -> int:
        return int(self._table.lengths[self._slot])

    @property
    def view(self) -> NDArray[np.int32]:
        """All tokens."""
        return self._table.tokens[self._slot, : self._table.lengths[self._slot]]


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedSession:
    """One followed session."""

    key: SessionKey
    session_id: SessionId
    """For logs."""
    table: SessionTable
    slot: int
    """Its row of the table."""
    plan: SpeculationPlan
    sampling: SamplingParams
    max_len: int
    prompt_len: int
    tokens: TokenRow
    structured_output: StructuredOutput | None = None
    """The form that its output must have; None: any."""
    stop_token_ids: tuple[int, ...] = ()
    """What ends such an output."""
    token_limits: TokenLimits | None = None
    """Which ids its output may be made of; None: all."""
    constraint: Constraint | None = None
    """What it may emit, by its form and the limits of its ids; None: anything, or its form is not
    known yet and drafts are not masked."""
    lost_reason: str = ""
    """Why the session is no longer drafted; empty while it is."""

    @property
    def digest(self) -> int:
        """Prefix digest of all tokens."""
        return int(self.table.digests[self.slot])

    @property
    def feature_end(self) -> int:
        """Number of positions whose feature was received."""
        return int(self.table.feature_ends[self.slot])

    @property
    def has_constraint(self) -> bool:
        """Whether not all ids may follow everywhere."""
        return self.structured_output is not None or self.token_limits is not None

    @property
    def ships_distributions(self) -> bool:
        """Whether the draft distributions that tokens are drawn from go out with the drafts."""
        return self.sampling.effective_rule is Rule.REJECTION

    @property
    def uses_prefix_noise(self) -> bool:
        """Whether each prefix draws from DRAFT noise of its own (`spec.noise.prefix_keys`). Under
        the rejection rule drafts that are thrown away must not condition those that are used; where
        drafts are made ahead, it is not known yet which these are."""
        return self.plan.look_ahead > 0 and self.ships_distributions

    @property
    def draft_levels_left(self) -> int:
        """Draft levels that can still become tokens: each round also emits one of its own."""
        return self.max_len - len(self.tokens) - 1


def check_announcement(start: SessionStart, limits: VerdictLimits) -> str:
    """Why an announcement makes no sense; empty if it does."""
    if not 0 < start.max_len <= limits.max_context:
        return "max_len"
    if not 0 < start.prompt_len <= start.max_len:
        return "prompt_len"
    return ""
