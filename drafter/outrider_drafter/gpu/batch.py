"""Static input buffers of a draft launch: stages the rows of a batch and uploads them.

A bucket is a batch size for which a CUDA graph is captured. Letters in shapes: B sessions of
a bucket; R new rows of a session; F uploaded feature rows; H feature width.
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
"""Number of int32 words for each session besides the words of its rows: slot, count, start, and two
words of the random-number key."""
_ROW_WORDS: Final = 2
"""Number of int32 words for each row: its token and the index of its feature."""
_WASTE: Final = 2
"""Maximum number of feature rows of a message, divided by the number of rows of the bucket, up to
which the whole message is uploaded. From larger messages the host first copies the needed rows."""


class LaunchSessions(NamedTuple):
    """Sessions of one draft launch, with the values that stay the same from draft to draft. Arrays
    are [B], with one element for each of B sessions."""

    table: SessionTable
    sessions: Sequence[FollowedSession]
    slots: NDArray[np.int64]
    """Slot of each session in the session table."""
    device_slots: NDArray[np.int64]
    """Slot of each session in `PagedDraftKV`."""
    wanted_nodes: NDArray[np.int64]
    """Number of draft tokens that each session's plan asks for."""
    has_penalties: bool
    """Whether any session has sampling penalties, for which the device counts the tokens."""
    has_logits_processing: bool
    """Whether any session processes its logits."""
    has_grammar: bool
    """Whether any session has a grammar or token limits."""
    needs_general_graph: NDArray[np.bool_]
    """Whether each session's drafts need the graph with logits processing."""
    keys: NDArray[np.uint64]
    """Key of the random numbers (noise stream DRAFT) with which each session draws its drafts; 0
    unless its acceptance rule is rejection."""
    uses_prefix_noise: NDArray[np.bool_]
    """Whether each session draws drafts for different prefixes with different random-number
    keys."""

    @classmethod
    def of_sessions(
        cls, sessions: Sequence[FollowedSession], seats: DraftSlotTable
    ) -> LaunchSessions:
        """Build the arrays for `sessions`. Each of these sessions must have a device slot and an
        entry in `seats`."""
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
        """Combine the sessions of several launches. All of them must be in the same session
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
        """uint64 [B]: key of the random numbers for a draft that continues each session's current
        prefix. It depends on the prefix where `uses_prefix_noise` is True, and equals `keys`
        elsewhere."""
        if not self.uses_prefix_noise.any():
            return self.keys
        own = prefix_keys(self.keys, self.table.digests[self.slots])
        return np.where(self.uses_prefix_noise, own, self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRows:
    """KV rows of the draft model that a launch computes for each of B sessions before it drafts.
    The last of a session's rows is its live row, from which the draft begins. Arrays are int64
    [B]."""

    members: LaunchSessions
    starts: NDArray[np.int64]
    """Index of the first new row of each session."""
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


class StagedRows(NamedTuple):
    """Input buffers on the host and on the device for one bucket, that is for B sessions with R new
    rows each. `upload` copies the contents of the host buffers into `rows` and `draft_keys`, which
    are on the device."""

    keys: NDArray[np.int64]
    """int64 [B]: random-number keys on the host."""
    head: NDArray[np.int32]
    """int32 [3, B]: device slots, counts and starts on the host."""
    tokens: NDArray[np.int32]
    """int32 [B, R]: tokens on the host; -1 for unused rows."""
    sources: NDArray[np.int32]
    """int32 [B, R]: index of each row's feature in `brought`."""
    staged: Tensor
    """int32: block of host memory that contains `keys`, `head`, `tokens` and `sources`."""
    uploaded: Tensor
    brought: Tensor
    """[F, H]: feature rows on the device, in the order in which they were received."""
    order: Tensor
    """int32 [B * R]: `sources` on the device."""
    rows: NewRows
    draft_keys: Tensor
    """int64 [B]: random-number keys on the device, as in `DraftSampling`."""

    def upload(self) -> None:
        """Copy the host buffers to the device asynchronously and gather the features of the rows.
        The call may be captured in a CUDA graph.

        The host buffers must not change until the launch has ended.
        """
        self.uploaded.copy_(self.staged, non_blocking=True)
        features = self.rows.features
        if features.shape[2]:
            torch.index_select(self.brought, 0, self.order, out=features.flatten(0, 1))


class DraftBatch:
    """Static input buffers of a draft launch, filled from the host.

    The launch itself uploads tokens, slots, counts and keys. Features are copied to the device
    before the launch. If they are in the ring of a shared-memory channel, they are copied directly
    from the ring, in the order in which they were received. Otherwise the host first puts them in
    the order of the rows.
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
        """Fill the host buffers of the bucket for `size` sessions with `num_rows` rows each, start
        to copy the features, and return the bucket's buffers. Unused entries get the padding slot.
        `ready` is None for a batch without sessions, as in a warm-up.

        The previous launch must have ended, because the buffers are reused. The device may read
        features directly from received messages, so these messages are not overwritten until
        `release_features` is called.
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
        """Return a copy [B, H] of each session's newest feature. `ready` must be the batch that was
        staged last."""
        lying = self._lying
        assert lying is not None
        newest: NDArray[np.generic] = lying.rows[lying.offsets + ready.counts - 1]
        return newest

    def release_features(self) -> None:
        """Release the features of the staged batch, so that their message may be overwritten. Call
        this after the launch that reads them has ended."""
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
    """Add the sessions' new tokens to the penalty counts on the device, which are in `warp`.
    `counted`: number of tokens counted so far for each slot of the session table; it is updated in
    place."""
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
