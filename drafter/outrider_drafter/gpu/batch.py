"""Static input buffers of a draft launch: stages the rows of a batch and uploads them.

B rows of a bucket, R new rows a session, F feature rows that are uploaded, H feature width.
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
"""Words of a session beside its rows: slot, count, start, and a key of two."""
_ROW_WORDS: Final = 2
"""Words of a row: its token, and which feature is its own."""
_WASTE: Final = 2
"""Rows that are uploaded from where they lie, at most, for each that a bucket has place for."""


class LaunchSessions(NamedTuple):
    """Sessions of one launch, and what stays as it is from draft to draft; columns [B]."""

    table: SessionTable
    sessions: Sequence[FollowedSession]
    slots: NDArray[np.int64]
    """Rows of the table."""
    device_slots: NDArray[np.int64]
    """Slots of `PagedDraftKV`."""
    wanted_nodes: NDArray[np.int64]
    """Nodes that their plans ask for."""
    has_penalties: bool
    """Whether tokens of any are counted for its penalties."""
    has_logits_processing: bool
    """Whether any session processes its logits."""
    has_grammar: bool
    """Whether any session is in a grammar."""
    needs_general_graph: NDArray[np.bool_]
    """Whether its drafts must come from the graph that processes logits."""
    keys: NDArray[np.uint64]
    """Keys of their DRAFT noise; 0 under other rules than rejection."""
    uses_prefix_noise: NDArray[np.bool_]
    """Whether each prefix draws from noise of its own."""

    @classmethod
    def of_sessions(
        cls, sessions: Sequence[FollowedSession], seats: DraftSlotTable
    ) -> LaunchSessions:
        """Sessions that are seated, and described there."""
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
        """The sessions of several launches, of one table."""
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
        """Keys of the noise that drafts for their present prefixes are drawn with; see
        `FollowedSession.uses_prefix_noise`."""
        if not self.uses_prefix_noise.any():
            return self.keys
        own = prefix_keys(self.keys, self.table.digests[self.slots])
        return np.where(self.uses_prefix_noise, own, self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRows:
    """Sessions with their new rows, the live one last in each; int64 columns [B]."""

    members: LaunchSessions
    starts: NDArray[np.int64]
    """First new row."""
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


class StagedRows(NamedTuple):
    """The batch's memory as one bucket sees it; `upload` brings `rows` and `draft_keys`."""

    keys: NDArray[np.int64]
    """[B]."""
    head: NDArray[np.int32]
    """[3, B]: slots, counts, starts."""
    tokens: NDArray[np.int32]
    """[B, R]."""
    sources: NDArray[np.int32]
    """[B, R]: which of the feature rows is each one's."""
    staged: Tensor
    """All of these as words."""
    uploaded: Tensor
    brought: Tensor
    """[F, H]: feature rows on the device, in the order in which they were told."""
    order: Tensor
    """int32 [B * R]: `sources` on the device."""
    rows: NewRows
    draft_keys: Tensor
    """int64 [B]: keys of their DRAFT noise, as in `DraftSampling`."""

    def upload(self) -> None:
        """Copy what was staged to the device, in the order of the stream, and put the features in
        order; may be part of a graph.

        The staging memory must stay as it is until the launch is over."""
        self.uploaded.copy_(self.staged, non_blocking=True)
        features = self.rows.features
        if features.shape[2]:
            torch.index_select(self.brought, 0, self.order, out=features.flatten(0, 1))


class DraftBatch:
    """Static inputs of a launch, filled from the host.

    Words are uploaded at the beginning of the launch, features by a copy before it. Features that
    lie in a shared-memory channel's memory are copied from there, in the order in which they were
    received; others are put in order by the host first.
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
        """most_rows: new rows of a session."""
        most = BATCH_SIZES[-1]
        cells = most * max_rows
        self._rows, self._width = rows, forward.feature_size
        self._first_token, self._calls = forward.first_token, driver_for(device)
        pinned = device.type == "cuda"
        words = _WORDS * most + _ROW_WORDS * cells
        self._uploaded = torch.zeros(words, dtype=torch.int32, device=device)
        self._staged = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        # Zeros: an unused row has some feature, which must be finite.
        shape = (_WASTE * cells, self._width)
        self._brought = torch.zeros(shape, dtype=dtype, device=device)
        self._ordered = torch.zeros((cells, self._width), dtype=dtype, device=device)
        gathered = torch.zeros((cells, self._width), dtype=dtype, pin_memory=pinned)
        self._gathered = to_raw_array(gathered)
        """[cells, H]: features that the host has put in order."""
        self._lying: FeatureView | None = None
        """The feature rows of the batch that was staged last, until they are let go."""
        self._buckets: dict[tuple[int, int], StagedRows] = {}

    def stage_rows(self, ready: ReadyRows | None, size: int, num_rows: int) -> StagedRows:
        """Stage a batch in a bucket; rows without a session are the padding slot's.

        The features are read from the messages that brought them, some by the device: until the
        launch is over, and `release_features` is called, nobody writes over these. The staging
        memory is free again: every launch is waited for before the next one.
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
        """Begin to copy the feature rows, and say which is whose."""
        held, slots = ready.members.table.features, ready.members.slots
        count, (size, num_rows) = len(ready), place.sources.shape
        lying = held.find_view(slots, ready.starts, ready.counts)
        if lying is None or len(lying.rows) > _WASTE * size * num_rows:
            rows = self._gathered[: count * num_rows]
            held.copy_rows(slots, ready.starts, ready.counts, rows.reshape(count, num_rows, -1))
            lying = FeatureView(rows, np.arange(count) * num_rows)
        self._calls.copy_array(self._brought[: len(lying.rows)], lying.rows)
        # Behind a session's rows its last one is repeated.
        within = np.minimum(np.arange(num_rows), ready.counts[:, None] - 1)
        place.sources[:count] = lying.offsets[:, None] + within
        self._lying = lying

    def newest_features(self, ready: ReadyRows) -> NDArray[np.generic]:
        """The newest feature rows [B, H] of the batch that was staged last, copied."""
        lying = self._lying
        assert lying is not None
        newest: NDArray[np.generic] = lying.rows[lying.offsets + ready.counts - 1]
        return newest

    def release_features(self) -> None:
        """The launch is over: the memory in which its features lie may be used for others."""
        self._lying = None

    def _bucket(self, size: int, num_rows: int) -> StagedRows:
        cells = size * num_rows
        keys, head, tokens = 2 * size, _WORDS * size, _WORDS * size + cells

        def split(memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            # Keys come first: there is where words of 8 bytes may be.
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
    """Tell the device's penalties of the tokens that are news to them; counted [X]: how many they
    know of, by slot of the table."""
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
