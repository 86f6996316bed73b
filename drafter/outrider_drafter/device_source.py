"""Drafts from an EAGLE-3 head whose whole draft is one launch on the device.

A batch of sessions costs one upload, one graph (catch-up, all levels, all choices) and one
download; the host waits for the device once (twice where laws come along: how much of them is to be
fetched is known after the first time). What the device does not cover (trees of the rejection rule)
goes to a `HeadSource` over the same weights.

X session slots; B rows of a bucket, R new rows a session, H hidden size, K chain length, n tree
nodes. A *seat* is a session's slot on the device.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Downloader
from outrider.engine.device.draft import DraftProgram
from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.device.shapes import bucket
from outrider.engine.draft_sampling import law_limits_for
from outrider.engine.heads import DraftHead
from outrider.engine.warper import has_penalties
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import DraftMethod
from outrider_drafter.device_batch import NEW_ROW_BUCKETS, DraftBatch, Members, Ready
from outrider_drafter.device_drafts import chains, lengths, trees
from outrider_drafter.device_laws import chains_with_laws
from outrider_drafter.device_rows import BLOCK_TOKENS, DeviceRows
from outrider_drafter.device_seats import UNSEATED, Seats
from outrider_drafter.device_shapes import (
    BATCH_SIZES,
    Shape,
    covers,
    family,
    fitted,
    most_sessions,
    shape_of,
)
from outrider_drafter.device_writes import RowWriter
from outrider_drafter.head_following import HeadFollower
from outrider_drafter.head_source import HeadSource
from outrider_drafter.sessions import Session, SessionKey
from outrider_drafter.source import Drafted

logger = logging.getLogger(__name__)

_TREE_ROWS: Final = 2048
"""Draft rows beyond its context that a session's table has room for."""


class DeviceHeadSource(HeadFollower):
    """The EAGLE-3 head as a draft source for an accelerator; on a CPU it runs the same code."""

    method = DraftMethod.EAGLE3

    def __init__(
        self,
        head: DraftHead,
        *,
        max_rows: int,
        max_context: int = 0,
        max_sessions: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        cuda_graphs: bool = True,
        bounded: bool = False,
    ) -> None:
        """`max_rows` bounds the K/V rows of all sessions (of those on the host apart);
        `max_context` (0: the head's own) the draft positions of one. bounded: whether plans are
        fitted into the shapes of `family`. Raises FailedPreconditionError for heads without plain
        EAGLE-3 weights."""
        super().__init__(
            head,
            max_context=max_context,
            rows_with_draft=NEW_ROW_BUCKETS[-1],
            dtype=dtype,
            device=device,
        )
        self._max_rows = max_rows
        self._bounded = bounded
        weights = HeadWeights.from_head(head)
        self._target_ids: NDArray[np.int32] = weights.target_ids.cpu().numpy().astype(np.int32)
        self._rows = DeviceRows(
            head.config,
            max_rows=max_rows,
            max_session_rows=self._max_context + _TREE_ROWS,
            max_sessions=max_sessions,
            dtype=dtype,
            device=self._device,
            draft_columns=weights.draft_columns,
        )
        self._program = DraftProgram(
            weights,
            storage=self._rows.storage,
            block_tokens=BLOCK_TOKENS,
            max_len=self._rows.capacity,
        )
        self.graphs = GraphCache(self._device, enabled=cuda_graphs)
        self._batch = DraftBatch(self._rows, self.feature_size, dtype, self._device)
        self._writer = RowWriter(
            self._program,
            self._rows,
            self.graphs,
            hidden=self.feature_size,
            dtype=dtype,
            device=self._device,
        )
        self._downloads = Downloader(self._device)
        self._seats = Seats()
        self._last: tuple[Sequence[Session], Shape, Members] | None = None
        """What was drafted together last, if that was all that was asked for; None once a session
        of it may have gone."""
        self._known: dict[SessionKey, int] = {}
        """Sessions that began on the device, and their slots of the session table."""
        self._on_host: set[SessionKey] = set()
        self._host: HeadSource | None = None

    @property
    def used_rows(self) -> int:
        """K/V rows reserved now."""
        return self._rows.used_rows + (self._host.used_rows if self._host else 0)

    def kv(self, handle: int, connection: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, S, d] of a session's stable rows, for inspection."""
        key = SessionKey(connection, handle)
        if key in self._on_host:
            return self._host_source().kv(handle, connection)
        slot = self._known[key]
        return self._rows.view(int(self._seats.seats[slot]), int(self._seats.stable[slot]))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs of the whole family, so that no session waits
        for it; what is not in it runs launch by launch from here on."""
        began = time.monotonic()
        self._writer.warm_up()
        for shape, general in family():
            sizes = [size for size in BATCH_SIZES if size <= most_sessions(shape)]
            for size, num_rows in itertools.product(sizes, NEW_ROW_BUCKETS):
                result, _ = self._launch(shape, None, size, num_rows, general=general)
                self._downloads.start(result).wait()
        self.graphs.sealed = True
        seconds = round(time.monotonic() - began, 1)
        logger.info("drafts captured", extra={"graphs": len(self.graphs), "seconds": seconds})

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[Session]) -> None:
        """Write the K/V of all rows that the sessions' features allow."""
        hosted = [session for session in sessions if self._is_on_host(session)]
        super().catch_up([session for session in sessions if session not in hosted])
        if hosted:
            self._host_source().catch_up(hosted)

    @torch.inference_mode()
    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        """Catch up and draft: one launch for all sessions of a shape; those that have much to catch
        up with, as after a prompt, hold up nobody and come last."""
        again = self._again(sessions)
        if again is not None:
            yield self._draft(*again)
            return
        groups: dict[tuple[bool, Shape], list[Session]] = {}
        hosted: list[Session] = []
        for session in sessions:
            shape = self._known_shape(session)
            if shape is None and self._is_on_host(session):
                hosted.append(session)
                continue
            if shape is None and self._follows(session):
                shape = self._new_shape(session)
            if shape is not None:
                late = len(session.tokens) - 1 - self._stable(session) > self._rows_with_draft
                groups.setdefault((late, shape), []).append(session)
        for (_, shape), members in sorted(groups.items(), key=lambda group: group[0][0]):
            seated = self._prepare(members, shape)
            most = most_sessions(shape)
            for first in range(0, len(seated), most):
                part: Sequence[Session] = seated[first : first + most]
                alike = len(part) == len(sessions)
                chosen = Members.of(sessions if alike else part, self._seats.seats, self._rows)
                if alike:
                    self._last = (sessions, shape, chosen)
                yield self._draft(shape, self._ready(chosen))
        if hosted:
            yield from self._host_source().drafts(hosted)

    def _again(self, sessions: Sequence[Session]) -> tuple[Shape, Ready] | None:
        """The same sessions in one launch once more, if nothing but their prefixes has changed and
        all of them still have room for the shape; None: work everything out."""
        if self._last is None or self._last[0] is not sessions:
            return None
        _, shape, members = self._last
        table, seats, slots = members.table, self._seats, members.slots
        live = table.lengths[slots] - 2
        most = live + 1 + shape.kept_rows(np.full(len(live), shape.depth))
        fit = (live >= 0) & (table.rooms(slots) >= shape.depth)
        fit &= table.feature_ends[slots] == live + 1
        fit &= (live + shape.depth <= self._max_context) & (most <= seats.room[slots])
        fit &= live + 1 - seats.stable[slots] <= self._rows_with_draft
        return (shape, self._ready(members)) if bool(fit.all()) else None

    def release(self, session: Session) -> None:
        """Free what is kept of a session; idempotent."""
        self._last = None
        if session.key in self._known:
            del self._known[session.key]
            if self._seats.seats[session.slot] != UNSEATED:
                self._give_up(session)
        if session.key in self._on_host:
            self._on_host.discard(session.key)
            self._host_source().release(session)

    def _is_on_host(self, session: Session) -> bool:
        """A session stays where it began: its K/V is there."""
        if session.key in self._known:
            return False
        if session.key not in self._on_host and not covers(session.sampling, session.plan):
            self._on_host.add(session.key)
        return session.key in self._on_host

    def _host_source(self) -> HeadSource:
        if self._host is None:
            self._host = HeadSource(
                self.head,
                max_rows=self._max_rows,
                max_context=self._max_context,
                dtype=self._dtype,
                device=self._device,
            )
        return self._host

    def _known_shape(self, session: Session) -> Shape | None:
        """What was grown for a seated session before, if that is still it."""
        shapes = self._seats.shapes
        known = shapes[session.slot] if session.slot < len(shapes) else None
        if known is None or known[0] is not session.plan or session.room < known[1].depth:
            return None
        return known[1]

    def _new_shape(self, session: Session) -> Shape | None:
        """What to grow for a seated session, worked out from its plan and its room."""
        shape = shape_of(session)
        if shape is not None and self._bounded:
            shape = fitted(shape)
        if shape is not None and session.room >= shape.depth:
            self._seats.shapes[session.slot] = (session.plan, shape)
        return shape

    def _prepare(self, members: Sequence[Session], shape: Shape) -> list[Session]:
        """Make ready for drafts of a shape; sessions that cannot be drafted are left out."""
        table, seats = members[0].table, self._seats
        slots = np.array([session.slot for session in members])
        live = table.lengths[slots] - 2
        depths = np.minimum(shape.depth, table.rooms(slots))
        fit = (live >= 0) & (table.feature_ends[slots] == live + 1)
        fit &= live + depths <= self._max_context
        slots, live, depths = slots[fit], live[fit], depths[fit]
        for slot in slots[live + 1 - seats.stable[slots] > self._rows_with_draft].tolist():
            self._write_ahead(table.session(slot), keep=1)
        rows = live + 1 + shape.kept_rows(depths)
        for index in np.flatnonzero(rows > seats.room[slots]).tolist():
            session = table.session(int(slots[index]))
            if seats.seats[session.slot] != UNSEATED:
                self._reserve(session, int(rows[index]))
        seated = seats.seats[slots] != UNSEATED
        return [table.session(slot) for slot in slots[seated].tolist()]

    def _ready(self, members: Members) -> Ready:
        """The rows to run; see `_prepare`."""
        live = members.table.lengths[members.slots] - 2
        starts = np.minimum(self._seats.stable[members.slots], live)
        return Ready(members, starts, live + 1 - starts)

    def _draft(self, shape: Shape, ready: Ready) -> Drafted:
        members, most = ready.members, int(ready.counts.max())
        size, num_rows = bucket(len(ready), BATCH_SIZES), bucket(most, NEW_ROW_BUCKETS)
        if members.penalised:
            self._count(members)
        result, entries = self._launch(shape, ready, size, num_rows, general=members.general)
        download = self._downloads.start(result)
        # While the device works.
        stops = ready.starts + ready.counts
        self._seats.stable[members.slots] = stops
        staged = self._batch.newest(ready, size, num_rows)
        members.table.features.use_batch(members.slots, ready.counts, stops, staged)
        words = download.wait().numpy()[: len(ready)]
        if entries is not None:
            cut = lengths(members, shape).tolist()
            ids = self._target_ids
            # Their entries come by another download, which may take this one's memory.
            drafts = chains_with_laws(words.copy(), entries, cut, ids, self._downloads)
            return Drafted.of(list(zip(members.sessions, drafts, strict=True)))
        return chains(members, shape, words) if shape.top_k == 1 else trees(members, words)

    def _launch(
        self, shape: Shape, ready: Ready | None, size: int, num_rows: int, *, general: bool
    ) -> tuple[Tensor, Tensor | None]:
        """int32 [B, K] tokens of chains; [B, 3, n] tokens, parents and log-prob bits of trees; with
        laws [B, 2K] tokens and sizes, and the entries (see `ChainLaws`)."""
        rows, state = self._batch.fill(ready, size, num_rows), self._rows.sampling
        warp = self._rows.warp.state if general else None

        def run() -> tuple[Tensor, Tensor | None]:
            if shape.top_k == 1:
                limits = law_limits_for(shape.depth) if shape.with_law else None
                chain = self._program.chain(
                    rows, state=state, length=shape.depth, warp=warp, law_limits=limits
                )
                if chain.laws is None:
                    return chain.tokens, None
                return torch.cat((chain.tokens, chain.laws.sizes), dim=1), chain.laws.entries
            tree = self._program.tree(
                rows,
                state=state,
                num_nodes=shape.num_nodes,
                top_k=shape.top_k,
                depth=shape.depth,
                warp=warp,
                coupled=general,
            )
            bits = tree.logprobs.view(torch.int32)
            return torch.stack((tree.tokens, tree.parents, bits), dim=1), None

        return self.graphs.run((shape, size, num_rows, general), run)

    def _count(self, members: Members) -> None:
        """Tell the device's penalties of the tokens that are news to them."""
        seats: list[int] = []
        news: list[NDArray[np.int32]] = []
        counted = self._seats.counted
        for session, seat in zip(members.sessions, members.seats.tolist(), strict=True):
            slot = session.slot
            if not has_penalties(session.sampling):
                continue
            known = session.tokens.view
            if counted[slot]:
                seats.append(seat)
                news.append(known[counted[slot] :])
            else:
                prompt, output = known[: session.prompt_len], known[session.prompt_len :]
                self._rows.warp.begin(seat, session.sampling, prompt_ids=prompt, output_ids=output)
            counted[slot] = len(known)
        self._rows.warp.count(seats, news)

    # ---- what a HeadFollower needs -------------------------------------------------------------

    def _follows(self, session: Session) -> bool:
        if session.key not in self._known:
            self._known[session.key] = session.slot
            self._seats.cover(session.slot + 1)
            self._seats.stable[session.slot] = self._seats.room[session.slot] = 0
            self._seats.counted[session.slot] = 0
            self._seats.seats[session.slot] = UNSEATED
            self._seats.shapes[session.slot] = None
            try:
                self._seats.seats[session.slot] = self._rows.open(session.sampling)
            except ResourceExhaustedError as error:
                logger.info(
                    "session not drafted",
                    extra={"session": session.session_id, "why": error.reason},
                )
                session.table.features.drop(session.slot)
        return bool(self._seats.seats[session.slot] != UNSEATED)

    def _stable(self, session: Session) -> int:
        return int(self._seats.stable[session.slot])

    def _make_room(self, session: Session, rows: int, ceiling: int) -> None:
        seat = int(self._seats.seats[session.slot])
        self._rows.reserve(seat, rows, ceiling=ceiling)
        self._seats.room[session.slot] = self._rows.room(seat)

    def _write(
        self,
        session: Session,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        self._writer.write(int(self._seats.seats[session.slot]), start, tokens, features)
        self._seats.stable[session.slot] = start + len(tokens)

    def _give_up(self, session: Session) -> None:
        self._last = None
        self._rows.close(int(self._seats.seats[session.slot]))
        self._seats.seats[session.slot] = UNSEATED
        self._seats.stable[session.slot] = self._seats.room[session.slot] = 0
        self._seats.shapes[session.slot] = None
