"""FollowedSession, a drafter's state of one session, and the checks of its announcement.

A session has tokens t_0 .. t_n, where t_n is the root, and features f_0 .. f_{n-1}. During a
chunked prefill there may be a feature for every known token. Once a draft is wanted, the newest
feature is f_{n-1}, one position before the root. Values that change with every round are in the
arrays of a `SessionTable`; a `FollowedSession` is one row of that table.
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
    """Key of a session: the connection that announced it, and its handle there. After a reconnect
    the session is announced again under a new key."""

    connection: int
    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLimits:
    """Bounds that the contents of verdicts and announcements must respect."""

    vocab_size: int
    feature_size: int
    """Width H of a feature row; 0 if this drafter uses no features."""
    max_context: int
    """Maximum length in tokens of a session that is followed."""


class TokenRow:
    """Tokens of one session, read from the session table without a copy."""

    __slots__ = ("_slot", "_table")

    def __init__(self, table: SessionTable, slot: int) -> None:
        self._table, self._slot = table, slot

    def __len__(self) -> int:
        return int(self._table.lengths[self._slot])

    @property
    def view(self) -> NDArray[np.int32]:
        """All tokens of the session, int32; a view of the table."""
        return self._table.tokens[self._slot, : self._table.lengths[self._slot]]


@dataclass(slots=True, kw_only=True, eq=False)
class FollowedSession:
    """State of one followed session."""

    key: SessionKey
    session_id: SessionId
    """Id of the session in logs."""
    table: SessionTable
    slot: int
    """Row of the session in `table`."""
    plan: SpeculationPlan
    sampling: SamplingParams
    max_len: int
    prompt_len: int
    tokens: TokenRow
    structured_output: StructuredOutput | None = None
    """Grammar that the session's output must follow; None if there is none."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a structured output."""
    token_limits: TokenLimits | None = None
    """Limits on the token ids of the output; None if all ids are allowed."""
    constraint: Constraint | None = None
    """Constraint made from the grammar and the token limits. None if there is no constraint, or the
    grammar is not compiled yet, in which case drafts are not masked."""
    lost_reason: str = ""
    """Reason why the session is no longer drafted; empty while it is drafted."""

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
        """Whether the session has a grammar or token limits."""
        return self.structured_output is not None or self.token_limits is not None

    @property
    def ships_distributions(self) -> bool:
        """Whether drafts are sent together with the draft distributions that their tokens are drawn
        from."""
        return self.sampling.effective_rule is Rule.REJECTION

    @property
    def uses_prefix_noise(self) -> bool:
        """Whether drafts for different prefixes of the session are drawn with different random
        numbers (`spec.noise.prefix_keys`). Under the rejection rule, a draft that is used must not
        share random numbers with a draft that is not used. With look-ahead, it is not known at
        drafting time which drafts will be used."""
        return self.plan.look_ahead > 0 and self.ships_distributions

    @property
    def draft_levels_left(self) -> int:
        """Maximum number of draft levels within the session's maximum length. One token is
        reserved, because each round emits a token of the target as well."""
        return self.max_len - len(self.tokens) - 1


def check_announcement(start: SessionStart, limits: VerdictLimits) -> str:
    """Return the name of the invalid field of an announcement, or an empty string if the
    announcement is valid."""
    if not 0 < start.max_len <= limits.max_context:
        return "max_len"
    if not 0 < start.prompt_len <= start.max_len:
        return "prompt_len"
    return ""
