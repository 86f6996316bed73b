"""KVProposer: base class of proposers with KV rows; catches sessions up with their new tokens.

A head's row i pairs feature f_i with token t_{i+1}, a model's has token t_i alone. Rows are stable
once they were made from committed tokens and real features; the live row is the newest, from which
a draft begins. H feature width, 0 without features.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.current_device import is_device_usable
from outrider.engine.heads import DraftHead
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import MAX_DRAFT_TOKENS
from outrider.wire.messages import FeatureLayout, TensorDtype, WireTensor
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_table import Indices, SessionTable

logger = logging.getLogger(__name__)

MAX_ROWS_PER_WRITE = 1024
"""Bounds the temporary memory of a long prompt's catch-up."""
_WIRE_DTYPES: Final = {
    torch.float32: TensorDtype.FLOAT32,
    torch.float16: TensorDtype.FLOAT16,
    torch.bfloat16: TensorDtype.BFLOAT16,
}


class RowInputs(NamedTuple):
    """What the rows of a source are made of."""

    feature_size: int = 0
    """H."""
    fingerprint: str = ""
    """Identity of the projection that makes the features."""

    @classmethod
    def of_head(cls, head: DraftHead) -> RowInputs:
        """Features of the target, projected for this head."""
        return cls(head.config.hidden_size, head.fingerprint)

    @property
    def first_token(self) -> int:
        """Index of the token of row 0; see `DraftForward`."""
        return 1 if self.feature_size else 0


class KVProposer(ABC):
    """Follows sessions with KV rows, and stops following one that finds no room."""

    def __init__(
        self,
        feed: RowInputs,
        *,
        max_context: int,
        rows_with_draft: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`max_context` bounds the draft positions of a session; up to `rows_with_draft` new rows
        are left to the draft that follows them."""
        self.feature_size, self.feature_fingerprint = feed.feature_size, feed.fingerprint
        self.feature_layout = FeatureLayout.PROJECTED if feed.feature_size else FeatureLayout.NONE
        self._first_token = feed.first_token
        self._max_context = max_context
        self._rows_with_draft = rows_with_draft
        self._dtype, self._device = dtype, torch.device(device)

    @property
    def is_usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return is_device_usable(self._device)

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Rows [F, H] as `to_raw_array` of this source's element type."""
        if wire.dtype is _WIRE_DTYPES.get(self._dtype):
            return wire.data.view(np.int16) if self._dtype is torch.bfloat16 else wire.data
        data = np.require(wire.data, requirements=("C", "W"))
        if wire.dtype is TensorDtype.BFLOAT16:
            rows = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            rows = torch.from_numpy(data)
        return to_raw_array(rows.to(self._dtype))

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Write the KV of all rows that the sessions' features allow."""
        for session in sessions:
            if self._follows(session):
                self._write_ahead(session, keep=0)

    def _write_ahead(self, session: FollowedSession, *, keep: int) -> None:
        """Write rows whose prediction nobody wants, but for the newest `keep`."""
        while True:
            start = self._stable(session)
            known = self._writable_rows(session) - start
            count = min(known - keep, MAX_ROWS_PER_WRITE)
            if count <= 0 or (keep and known <= self._rows_with_draft):
                return
            stop = start + count
            if stop > self._max_context:
                self._shut(session, "context")
                return
            if not self._reserve(session, stop):
                return
            first = start + self._first_token
            tokens = session.tokens.view[first : first + count]
            if not self.feature_size:
                self._write(session, start, tokens, np.empty((count, 0), dtype=np.int16))
                continue
            held = session.table.features
            rows = held.read_rows(session.slot, start, stop)
            self._write(session, start, tokens, rows)
            held.mark_consumed(session.slot, stop, rows[-1])

    def _writable_rows(self, session: FollowedSession) -> int:
        """Rows that could be written by now."""
        known = len(session.tokens) - self._first_token
        return min(session.feature_end, known) if self.feature_size else known

    def _live_row(self, session: FollowedSession, depth: int) -> int | None:
        """The row that a draft of `depth` levels begins with; None if there can be none."""
        slots = np.array([session.slot])
        live = self._live_rows(session.table, slots)
        fits = self._can_draft(session.table, slots, live, np.array([depth]))
        return int(live[0]) if fits[0] else None

    def _live_rows(self, table: SessionTable, slots: Indices) -> Indices:
        """The row that the next draft of each session begins with; below 0: there is none."""
        found: Indices = table.lengths[slots] - 1 - self._first_token
        return found

    def _can_draft(
        self, table: SessionTable, slots: Indices, live: Indices, depths: Indices
    ) -> NDArray[np.bool_]:
        """Whether all that the rows up to the live ones are made of is there, and drafts of these
        depths stay within the context; all [B]."""
        fits: NDArray[np.bool_] = (live >= 0) & (live + depths <= self._max_context)
        return fits & (table.feature_ends[slots] > live) if self.feature_size else fits

    def _reserve(self, session: FollowedSession, rows: int) -> bool:
        """Make room for `rows` of a session in all; where there is none, it is shut."""
        try:
            self._reserve_blocks(session, rows, session.max_len + MAX_DRAFT_TOKENS)
        except ResourceExhaustedError as error:
            self._shut(session, error.reason)
            return False
        return True

    def _shut(self, session: FollowedSession, why: str) -> None:
        """The session is not followed any more."""
        logger.info("session not drafted", extra={"session_id": session.session_id, "why": why})
        session.table.features.drop_slot(session.slot)
        self._give_up(session)

    def _tensor(self, rows: NDArray[np.generic]) -> Tensor:
        """`to_raw_array` rows on the device."""
        owned = rows if rows.flags.writeable else rows.copy()
        tensor = torch.from_numpy(owned)
        if self._dtype is torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device)

    @abstractmethod
    def _follows(self, session: FollowedSession) -> bool:
        """Whether the session has KV here; begins it if it is new."""

    @abstractmethod
    def _stable(self, session: FollowedSession) -> int:
        """Stable rows of a session."""

    @abstractmethod
    def _reserve_blocks(self, session: FollowedSession, rows: int, ceiling: int) -> None:
        """Room for `rows`, of at most `ceiling` ever. Raises ResourceExhaustedError."""

    @abstractmethod
    def _write(
        self,
        session: FollowedSession,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        """Write rows from `start` on and declare them stable; tokens [m], features [m, H]."""

    @abstractmethod
    def _give_up(self, session: FollowedSession) -> None:
        """Free a session's KV; it has none from here on."""


def to_raw_array(tensor: Tensor) -> NDArray[np.generic]:
    """A view of a tensor on the host; numpy holds bfloat16 as its bits."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return np.asarray(tensor.numpy())
