"""KVProposer: base class of proposers with KV rows, which writes the rows of new tokens.

Row i of an EAGLE head pairs feature f_i with token t_{i+1}; row i of a small model has token t_i
alone. A row is stable once it was made from committed tokens and real features. The live row is the
newest row, from which a draft begins. Letters in shapes: B sessions of a batch; F feature rows; m
rows of a write; H feature width, 0 without features.
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
"""Maximum number of rows that are written at once, which bounds the temporary memory for long
prompts."""
_WIRE_DTYPES: Final = {
    torch.float32: TensorDtype.FLOAT32,
    torch.float16: TensorDtype.FLOAT16,
    torch.bfloat16: TensorDtype.BFLOAT16,
}


class RowInputs(NamedTuple):
    """Inputs that each KV row of a draft model has in addition to its token."""

    feature_size: int = 0
    """H, width of a feature row; 0 if the rows have no features."""
    fingerprint: str = ""
    """Identity of the projection that makes the features."""

    @classmethod
    def of_head(cls, head: DraftHead) -> RowInputs:
        """Return the inputs of an EAGLE head: the target's features, projected for this head."""
        return cls(head.config.hidden_size, head.fingerprint)

    @property
    def first_token(self) -> int:
        """Index, among a session's tokens, of the token of KV row 0; see
        `DraftForward.first_token`."""
        return 1 if self.feature_size else 0


class KVProposer(ABC):
    """Base class of proposers that keep KV rows for each session. They stop drafting for a session
    when there is no KV memory for it."""

    def __init__(
        self,
        feed: RowInputs,
        *,
        max_context: int,
        rows_with_draft: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Create a proposer without sessions. `max_context`: maximum number of draft positions of a
        session. `rows_with_draft`: maximum number of new rows that are run as part of the next
        draft instead of before it."""
        self.feature_size, self.feature_fingerprint = feed.feature_size, feed.fingerprint
        self.feature_layout = FeatureLayout.PROJECTED if feed.feature_size else FeatureLayout.NONE
        self._first_token = feed.first_token
        self._max_context = max_context
        self._rows_with_draft = rows_with_draft
        self._dtype, self._device = dtype, torch.device(device)

    @property
    def is_usable(self) -> bool:
        """Whether the device still works. Waits for all launched work."""
        return is_device_usable(self._device)

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Return feature rows [F, H] in this proposer's element type, in the format of
        `to_raw_array`."""
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
        """Write the KV of all rows of these sessions whose tokens and, if the model needs them,
        features have been received."""
        for session in sessions:
            if self._follows(session):
                self._write_ahead(session, keep=0)

    def _write_ahead(self, session: FollowedSession, *, keep: int) -> None:
        """Write rows that need no prediction, except the newest `keep` rows."""
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
        """Return the number of rows for which tokens and, if needed, features are known."""
        known = len(session.tokens) - self._first_token
        return min(session.feature_end, known) if self.feature_size else known

    def _live_row(self, session: FollowedSession, depth: int) -> int | None:
        """Return the row from which a draft of `depth` levels begins, or None if the session cannot
        be drafted."""
        slots = np.array([session.slot])
        live = self._live_rows(session.table, slots)
        fits = self._can_draft(session.table, slots, live, np.array([depth]))
        return int(live[0]) if fits[0] else None

    def _live_rows(self, table: SessionTable, slots: Indices) -> Indices:
        """Return the row from which the next draft of each session begins; negative if there is
        none."""
        found: Indices = table.lengths[slots] - 1 - self._first_token
        return found

    def _can_draft(
        self, table: SessionTable, slots: Indices, live: Indices, depths: Indices
    ) -> NDArray[np.bool_]:
        """Return whether the inputs of all rows up to the live one are known and drafts of these
        depths fit into the context. All arrays are [B]."""
        fits: NDArray[np.bool_] = (live >= 0) & (live + depths <= self._max_context)
        return fits & (table.feature_ends[slots] > live) if self.feature_size else fits

    def _reserve(self, session: FollowedSession, rows: int) -> bool:
        """Reserve KV for `rows` rows of a session in total. Without memory, stop following the
        session and return False."""
        try:
            self._reserve_blocks(session, rows, session.max_len + MAX_DRAFT_TOKENS)
        except ResourceExhaustedError as error:
            self._shut(session, error.reason)
            return False
        return True

    def _shut(self, session: FollowedSession, why: str) -> None:
        """Stop following a session."""
        logger.info("session not drafted", extra={"session_id": session.session_id, "why": why})
        session.table.features.drop_slot(session.slot)
        self._give_up(session)

    def _tensor(self, rows: NDArray[np.generic]) -> Tensor:
        """Return rows in the format of `to_raw_array` as a tensor on the device."""
        owned = rows if rows.flags.writeable else rows.copy()
        tensor = torch.from_numpy(owned)
        if self._dtype is torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device)

    @abstractmethod
    def _follows(self, session: FollowedSession) -> bool:
        """Return whether the session is followed; a new session is added first."""

    @abstractmethod
    def _stable(self, session: FollowedSession) -> int:
        """Return the number of stable rows of a session."""

    @abstractmethod
    def _reserve_blocks(self, session: FollowedSession, rows: int, ceiling: int) -> None:
        """Reserve KV for `rows` rows in total; the session never needs more than `ceiling`. Raises
        ResourceExhaustedError."""

    @abstractmethod
    def _write(
        self,
        session: FollowedSession,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        """Write rows from `start` on and mark them stable; tokens [m], features [m, H]."""

    @abstractmethod
    def _give_up(self, session: FollowedSession) -> None:
        """Free a session's KV for good."""


def to_raw_array(tensor: Tensor) -> NDArray[np.generic]:
    """Return a numpy view of a tensor on the host. bfloat16 values are represented by their bits as
    int16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return np.asarray(tensor.numpy())
