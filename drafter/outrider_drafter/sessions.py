"""What a drafter knows of each session, and the checks that every verdict must pass.

Tokens t_0 .. t_n (t_n is the root) and features f_0 .. f_{n-1}. During a chunked prefill the
features may cover every known token; once a draft is wanted they end one before the root.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import Plan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionStart, TensorDtype, Verdict, WireTensor

_INT32 = np.dtype(np.int32)
_NUMPY_DTYPES = {
    TensorDtype.FLOAT32: np.dtype(np.float32),
    TensorDtype.FLOAT16: np.dtype(np.float16),
    TensorDtype.BFLOAT16: np.dtype(np.uint16),
}
_FIRST_CAPACITY = 256


class SessionKey(NamedTuple):
    """A session is known under the connection that announced it; a reconnect starts it afresh."""

    connection: int
    handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a verdict may contain."""

    vocab_size: int
    feature_size: int
    """Width H of a feature row; 0 if this drafter takes none."""
    max_context: int
    """Longest session in tokens that is followed at all."""


class TokenBuffer:
    """A growing int32 array of token ids, read as a view."""

    __slots__ = ("_data", "_len")

    def __init__(self) -> None:
        self._data = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def view(self) -> NDArray[np.int32]:
        """All tokens; valid until the next `extend`."""
        return self._data[: self._len]

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append `tokens`, doubling the storage when it is full."""
        end = self._len + len(tokens)
        if end > len(self._data):
            grown = np.empty(max(end, 2 * len(self._data)), dtype=np.int32)
            grown[: self._len] = self.view
            self._data = grown
        self._data[self._len : end] = tokens
        self._len = end


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One followed session."""

    key: SessionKey
    session_id: SessionId
    """For logs."""
    plan: Plan
    sampling: SamplingParams
    max_len: int
    prompt_len: int
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    digest: int = EMPTY_DIGEST
    feature_end: int = 0
    """Number of positions whose feature was received."""
    pending: list[WireTensor] = field(default_factory=list)
    """Received features that no draft source has consumed yet, in order."""
    wants_draft: bool = False
    lost: str = ""
    """Why the session is no longer drafted; empty while it is."""

    @property
    def room(self) -> int:
        """Draft levels that can still become tokens: each round also emits one of its own."""
        return self.max_len - len(self.tokens) - 1


def open_session(connection: int, start: SessionStart, limits: Limits) -> Session | str:
    """A new session, or the reason why its announcement makes no sense."""
    if not 0 < start.max_len <= limits.max_context:
        return "max_len"
    if not 0 < start.prompt_len <= start.max_len:
        return "prompt_len"
    return Session(
        key=SessionKey(connection, start.handle),
        session_id=start.session_id,
        plan=start.plan,
        sampling=start.sampling,
        max_len=start.max_len,
        prompt_len=start.prompt_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerdictStep:
    """The new part of a verdict, checked."""

    tokens: NDArray[np.int32]
    digest: int
    features: WireTensor | None
    wants_draft: bool


def check_verdict(session: Session, verdict: Verdict, limits: Limits) -> VerdictStep | str:
    """The part of `verdict` that is news to `session`, or the reason why it cannot be followed.

    A repeated verdict is no error as long as it says the same; a gap or a contradiction is.
    """
    tokens = verdict.tokens
    if tokens.ndim != 1 or tokens.dtype != _INT32:
        return "token_shape"
    known = len(session.tokens)
    if not 0 <= verdict.start <= known:
        return "token_gap"
    if verdict.start + len(tokens) > session.max_len:
        return "too_long"
    ids = tokens.tolist()
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        return "token_range"
    overlap = known - verdict.start
    fresh = tokens
    if overlap:
        repeated = session.tokens.view[verdict.start : verdict.start + len(tokens)]
        if not np.array_equal(repeated, tokens[:overlap]):
            return "token_conflict"
        fresh, ids = tokens[overlap:], ids[overlap:]
    digest = extend_digest(session.digest, ids)
    if len(tokens) >= overlap and digest != verdict.prefix_digest:
        return "digest"
    features = _fresh_features(session, verdict, known + len(fresh), limits)
    if isinstance(features, str):
        return features
    return VerdictStep(
        tokens=fresh,
        digest=digest,
        features=features,
        wants_draft=verdict.draft_wanted and len(tokens) >= overlap,
    )


def _fresh_features(
    session: Session, verdict: Verdict, num_tokens: int, limits: Limits
) -> WireTensor | str | None:
    wire = verdict.features
    if wire is None or not limits.feature_size:
        return None
    data = wire.data
    if wire.dtype not in _NUMPY_DTYPES or data.dtype != _NUMPY_DTYPES[wire.dtype]:
        return "feature_dtype"
    if data.ndim != 2 or data.shape[1] != limits.feature_size:
        return "feature_shape"
    if not 0 <= verdict.feature_start <= session.feature_end:
        return "feature_gap"
    last = num_tokens - 1 if verdict.draft_wanted else num_tokens
    if verdict.feature_start + data.shape[0] > last:
        return "feature_range"
    if verdict.feature_start < session.feature_end:
        data = data[session.feature_end - verdict.feature_start :]
        wire = WireTensor(dtype=wire.dtype, data=data)
    return wire if len(data) else None


def apply_step(session: Session, step: VerdictStep) -> None:
    """Take a checked verdict into the session."""
    session.tokens.extend(step.tokens)
    session.digest = step.digest
    if step.features is not None:
        session.pending.append(step.features)
        session.feature_end += len(step.features.data)
    if step.wants_draft or len(step.tokens):
        session.wants_draft = step.wants_draft


class SessionTable:
    """All followed sessions, at most `max_sessions`; the least recently used one makes room."""

    def __init__(self, max_sessions: int) -> None:
        self._max = max_sessions
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey) -> Session | None:
        """The session, marked as just used."""
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
        return session

    def add(self, session: Session) -> list[Session]:
        """Insert a session; returns those that had to go for it (an older one of its key too)."""
        gone = [old] if (old := self._sessions.pop(session.key, None)) else []
        while len(self._sessions) >= self._max:
            gone.append(self._sessions.popitem(last=False)[1])
        self._sessions[session.key] = session
        return gone

    def remove(self, key: SessionKey) -> Session | None:
        """Take a session out; None if it is not there."""
        return self._sessions.pop(key, None)

    def of_connection(self, connection: int) -> list[Session]:
        """The sessions that one connection announced."""
        return [s for s in self._sessions.values() if s.key.connection == connection]
