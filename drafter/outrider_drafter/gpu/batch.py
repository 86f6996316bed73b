"""Static input buffers of a draft launch: stages the rows of a batch and uploads them.

A bucket is a batch size for which a CUDA graph is captured. Letters in shapes: B rows of a bucket,
one for each session; R new rows of a session; F uploaded feature rows; H feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import DraftForward, NewRows
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.transfer.cuda_driver import driver_for
from outrider.engine.logits_processor import has_penalties
from outrider.spec.noise import prefix_keys
from outrider_drafter.gpu import draft_slots as seating
from outrider_drafter.gpu.draft_slots import DraftSlotTable
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.gpu.shapes import BATCH_SIZES
from outrider_drafter.proposers.kv_proposer import to_raw_array
from outrider_drafter.state.feature_buffer import FeatureView
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_table import SessionTable

_WORDS: Final = 5
"""Number of int32 words for each session besides its rows: slot, count, start, and two words of
noise key."""
_ROW_WORDS: Final = 2
"""Number of int32 words for each row: its token and the index of its feature."""
_WASTE: Final = 2
"""Maximum number of feature rows that are uploaded in place for each row of the bucket. Messages
with more rows are reordered by the host first."""


class LaunchSessions(NamedTuple):
    """Sessions of one launch, with values that are the same for all of their drafts. Columns are
    [B]."""

    table: SessionTable
    sessions: Sequence[FollowedSession]
    slots: NDArray[np.int64]
    """Slots in the session table."""
    device_slots: NDArray[np.int64]
    """Slots of the sessions in `PagedDraftKV`."""
    wanted_nodes: NDArray[np.int64]
    """Number of draft tokens that each session's plan asks for."""
    has_penalties: bool
    """Whether any session has sampling penalties, so that its tokens are counted."""
    has_logits_processing: bool
    """Whether any session processes its logits."""
    has_grammar: bool
    """Whether any session has a grammar or token limits."""
    needs_general_graph: NDArray[np.bool_]
    """Whether each session's drafts need the graph with logits processing."""
    keys: NDArray[np.uint64]
    """Keys of the random numbers (DRAFT noise) that each session's drafts are drawn with; 0 unless
    the acceptance rule is rejection."""
    uses_prefix_noise: NDArray[np.bool_]
    """Whether each session draws its drafts with a different noise key for every prefix."""

    @classmethod
    def of_sessions(
        cls, sessions: Sequence[FollowedSession], seats: DraftSlotTable
    ) -> LaunchSessions:
        """Return the columns of sessions that have device slots and are described in `seats`."""
        slots = np.array([session.slot for session in sessions], dtype=np.int64)
        traits = seats.traits[slots]
        found = int(np.bitwise_or.reduce(traits))
        return cls(
            table=sessions[0].table,
            sessions=sessions,
            slots=slots,
            device_slots=seats.seats[slots],
            wanted_nodes=seats.wanted[slots],
            has_penalties=bool(found & seating.HAS_PENALTIES),
            has_logits_processing=bool(found & seating.HAS_LOGITS_PROCESSING),
            has_grammar=bool(found & seating.HAS_GRAMMAR),
            needs_general_graph=(traits & seating.NEEDS_GENERAL_GRAPH) != 0,
            keys=seats.keys[slots],
            uses_prefix_noise=(traits & seating.USES_PREFIX_NOISE) != 0,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[LaunchSessions]) -> LaunchSessions:
        """Return the sessions of several launches together; all must belong to one session
        table."""
        return cls(
            table=parts[0].table,
            sessions=[session for part in parts for session in part.sessions],
            slots=np.concatenate([part.slots for part in parts]),
            device_slots=np.concatenate([part.device_slots for part in parts]),
            wanted_nodes=np.concatenate([part.wanted_nodes for part in parts]),
            has_penalties=any(part.has_penalties for part in parts),
            has_logits_processing=any(part.has_logits_processing for part in parts),
            has_grammar=any(part.has_grammar for part in parts),
            needs_general_graph=np.concatenate([part.needs_general_graph for part in parts]),
            keys=np.concatenate([part.keys for part in parts]),
            uses_prefix_noise=np.concatenate([part.uses_prefix_noise for part in parts]),
        )

    @property
    def draft_keys(self) -> NDArray[np.uint64]:
        """Keys of the noise for drafts that continue the sessions' current prefixes; see
        `FollowedSession.uses_prefix_noise`."""
        if not self.uses_prefix_noise.any():
            return self.keys
        own = prefix_keys(self.keys, self.table.digests[self.slots])
        return np.where(self.uses_prefix_noise, own, self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRows:
    """New rows of each session. The last of them is the session's live row, from which the draft
    begins. Columns are int64 [B]."""

    members: LaunchSessions
    starts: NDArray[np.int64]
    """Index of the first new row."""
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


class StagedRows(NamedTuple):
    """Input memory of one bucket on the host and the device. `upload` fills `rows` and `draft_keys`
    on the device."""

    keys: NDArray[np.int64]
    """int64 [B]: noise keys on the host."""
    head: NDArray[np.int32]
    """int32 [3, B]: device slots, counts and starts on the host."""
    tokens: NDArray[np.int32]
    """int32 [B, R]: tokens on the host; -1 for unused rows."""
    sources: NDArray[np.int32]
    """int32 [B, R]: index of each row's feature in `brought`."""
    staged: Tensor
    """int32: all of these arrays in one block of host memory."""
    uploaded: Tensor
    brought: Tensor
    """[F, H]: feature rows on the device, in the order in which they were received."""
    order: Tensor
    """int32 [B * R]: `sources` on the device."""
    rows: NewRows
    draft_keys: Tensor
    """int64 [B]: noise keys on the device, as in `DraftSampling`."""

    def upload(self) -> None:
        """Copy the staged words to the device, in stream order, and gather the features of the
        rows. May be part of a graph.

        The staging memory must not change until the launch has ended.
        """
        self.uploaded.copy_(self.staged, non_blocking=True)
        features = self.rows.features
        if features.shape[2]:
            torch.index_select(self.brought, 0, self.order, out=features.flatten(0, 1))


class DraftBatch:
    """Static inputs of a launch, filled from the host.

    Tokens, slots, counts and keys are uploaded at the beginning of the launch; features are copied
    before it. Features in the ring of a shared-memory channel are copied from there in the order in
    which they were received; the host puts other features in order first.
    """

    def __init__(
        self,
        rows: PagedDraftKV,
        forward: DraftForward,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
    ) -> None:
        """Allocate the buffers. `max_rows`: maximum number of new rows of a session."""
        most = BATCH_SIZES[-1]
        cells = most * max_rows
        self._rows, self._width = rows, forward.feature_size
        self._first_token, self._calls = forward.first_token, driver_for(device)
        pinned = device.type == "cuda"
        words = _WORDS * most + _ROW_WORDS * cells
        self._uploaded = torch.zeros(words, dtype=torch.int32, device=device)
        self._staged = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        # Zeros, because unused rows read features too, and these must be finite.
        shape = (_WASTE * cells, self._width)
        self._brought = torch.zeros(shape, dtype=dtype, device=device)
        self._ordered = torch.zeros((cells, self._width), dtype=dtype, device=device)
        gathered = torch.zeros((cells, self._width), dtype=dtype, pin_memory=pinned)
        self._gathered = to_raw_array(gathered)
        """[rows, H]: features that the host has put in order."""
        self._lying: FeatureView | None = None
        """Feature rows of the batch that was staged last; None once they are released."""
        self._buckets: dict[tuple[int, int], StagedRows] = {}

    def stage_rows(self, ready: ReadyRows | None, size: int, num_rows: int) -> StagedRows:
        """Stage a batch in the bucket of `size` sessions with `num_rows` rows each. Unused sessions
        of the bucket get the padding slot.

        The device may read features directly from the messages, which are therefore not overwritten
        until `release_features` is called. The previous launch must have ended, because staging
        memory is reused.
        """
        place = self._buckets.get((size, num_rows))
        if place is None:
            place = self._buckets[size, num_rows] = self._bucket(size, num_rows)
        count = 0 if ready is None else len(ready)
        place.head[0, count:] = self._rows.padding
        place.head[1:, count:] = 0
        place.tokens[count:] = -1
        place.sources[count:] = 0
        if ready is not None:
            table, slots = ready.members.table, ready.members.slots
            place.head[0, :count] = ready.members.device_slots
            place.head[1, :count] = ready.counts
            place.head[2, :count] = ready.starts
            place.keys[:count] = ready.members.draft_keys.view(np.int64)
            within = np.arange(num_rows)
            known = ready.starts[:, None] + self._first_token + within
            known = np.minimum(known, table.tokens.shape[1] - 1)
            tokens = table.tokens[slots[:, None], known]
            place.tokens[:count] = np.where(within < ready.counts[:, None], tokens, -1)
            if self._width:
                self._bring(ready, place)
        return place

    def _bring(self, ready: ReadyRows, place: StagedRows) -> None:
        """Start to copy the feature rows, and stage the index of each row's feature."""
        held, slots = ready.members.table.features, ready.members.slots
        count, (size, num_rows) = len(ready), place.sources.shape
        lying = held.find_view(slots, ready.starts, ready.counts)
        if lying is None or len(lying.rows) > _WASTE * size * num_rows:
            rows = self._gathered[: count * num_rows]
            held.copy_rows(slots, ready.starts, ready.counts, rows.reshape(count, num_rows, -1))
            lying = FeatureView(rows, np.arange(count) * num_rows)
        self._calls.copy_array(self._brought[: len(lying.rows)], lying.rows)
        # The last row of a session is repeated in its unused rows.
        within = np.minimum(np.arange(num_rows), ready.counts[:, None] - 1)
        place.sources[:count] = lying.offsets[:, None] + within
        self._lying = lying

    def newest_features(self, ready: ReadyRows) -> NDArray[np.generic]:
        """Return a copy of each session's newest feature [B, H] in the batch that was staged
        last."""
        lying = self._lying
        assert lying is not None
        newest: NDArray[np.generic] = lying.rows[lying.offsets + ready.counts - 1]
        return newest

    def release_features(self) -> None:
        """Release the memory of the features. Call this after the launch that reads them has
        ended."""
        self._lying = None

    def _bucket(self, size: int, num_rows: int) -> StagedRows:
        cells = size * num_rows
        keys, head, tokens = 2 * size, _WORDS * size, _WORDS * size + cells

        def split(memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            # Keys come first, where 8-byte words are aligned.
            return (
                memory[:keys].view(torch.int64),
                memory[keys:head].view(3, size),
                memory[head:tokens].view(size, num_rows),
                memory[tokens:].view(size, num_rows),
            )

        words = _WORDS * size + _ROW_WORDS * cells
        staged, uploaded = self._staged[:words], self._uploaded[:words]
        host, device = [part.numpy() for part in split(staged)], split(uploaded)
        slots, counts, starts = device[1].unbind()
        return StagedRows(
            keys=host[0],
            head=host[1],
            tokens=host[2],
            sources=host[3],
            staged=staged,
            uploaded=uploaded,
            brought=self._brought,
            order=device[3].flatten(),
            rows=NewRows(
                slots=slots,
                tables=self._rows.tables,
                tokens=device[2],
                features=self._ordered[:cells].view(size, num_rows, self._width),
                counts=counts,
                starts=starts,
            ),
            draft_keys=device[0],
        )


def update_penalty_counts(
    members: LaunchSessions, counted: NDArray[np.int64], warp: LogitsSlots
) -> None:
    """Count the sessions' new tokens in the penalty state on the device. `counted` [X]: number of
    tokens counted so far, by slot of the session table; updated in place."""
    seats: list[int] = []
    news: list[NDArray[np.int32]] = []
    for session, seat in zip(members.sessions, members.device_slots.tolist(), strict=True):
        slot = session.slot
        if not has_penalties(session.sampling):
            continue
        known = session.tokens.view
        if counted[slot]:
            seats.append(seat)
            news.append(known[counted[slot] :])
        else:
            prompt, output = known[: session.prompt_len], known[session.prompt_len :]
            warp.begin_session(seat, session.sampling, prompt_ids=prompt, output_ids=output)
        counted[slot] = len(known)
    warp.count_tokens(seats, news)
