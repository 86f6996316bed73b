"""Which rows of a round share a launch on the device (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.engine.device.graphs.shapes import Drafts, Judge
from outrider.engine.device.inputs.prefill_chunks import Piece, cut
from outrider.engine.device.inputs.round_rows import RoundRows, RowInput
from outrider.engine.device.logprobs import Asked
from outrider.engine.device.round_launcher import Launched
from outrider.wire.messages import Proposals
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow, legal_masks
from outrider_verifier.model_runner.gpu_runner.device_slots import Seat
from outrider_verifier.state.session import keep_features

_NO_ROWS: Final = RoundRows.of([])


@dataclass(slots=True, eq=False)
class Chunk:
    """Prompt tokens of a session, as pieces of a launch."""

    place: int
    """In the round's prompts."""
    row: PrefillRow
    first: int
    """Its first piece, of the launch's."""
    pieces: list[Piece]

    @property
    def last(self) -> int:
        """Its last piece, of the launch's."""
        return self.first + len(self.pieces) - 1


@dataclass(slots=True, eq=False)
class Group:
    """Rows of one launch, by their place in the round."""

    places: list[int]
    rows: list[VerifyRow]
    seats: list[Seat]
    inputs: RoundRows = _NO_ROWS
    drafts: Drafts = Drafts.NONE
    judge: Judge = Judge.SAMPLED
    chunks: list[Chunk] = field(default_factory=list)
    launched: Launched | None = None
    placed_for: int | None = None
    """The link to whose drafter its features may be sent as they lie."""
    blank: frozenset[int] = frozenset()
    """Which of the rows, of own drafts, have none yet."""
    cut: dict[int, int] = field(default_factory=dict)
    """Own drafts that are verified of rows of which not all are."""

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, chunk by chunk."""
        return [piece for chunk in self.chunks for piece in chunk.pieces]

    @property
    def keeps_features(self) -> bool:
        """Whether any session of the launch keeps features."""
        return keep_features([row.session for row in self.rows]) or keep_features(
            [chunk.row.session for chunk in self.chunks]
        )

    @property
    def link_id(self) -> int | None:
        """That of the one drafter that may hear of all features that the launch makes; None: there
        is no such."""
        links = {row.session.link_id for row in self.rows}
        links |= {chunk.row.session.link_id for chunk in self.chunks}
        return links.pop() if len(links) == 1 else None

    @property
    def own(self) -> bool:
        """Whether the rows verify drafts of this process's own head."""
        return self.drafts is Drafts.OWN


@dataclass(slots=True, eq=False)
class DeviceFlight:
    """A round on its way."""

    prefill: Sequence[PrefillRow]
    verify: Sequence[VerifyRow]
    groups: list[Group]
    submitted: float
    """On the clock of `time.perf_counter`."""

    @property
    def launched_at(self) -> float:
        """When the device had the first launch."""
        launched = self.groups[0].launched if self.groups else None
        return self.submitted if launched is None else launched.at


def asked_of(group: Group) -> Asked | None:
    """Which of the tokens that a launch emits come with log-probabilities; None: none of them."""
    rows: list[int] = []
    tops: list[int] = []
    depth = 0
    for place, row in enumerate(group.rows):
        top = row.session.spec.top_logprobs
        if top is None:
            continue
        rows.append(place)
        tops.append(top)
        draft = row.draft
        deepest = int(draft.depths.max()) if draft is not None and len(draft.tree) else 0
        depth = max(depth, 1 + deepest, 1 + (row.own_depth if group.own else 0))
    pieces: list[int] = []
    for chunk in group.chunks:
        top = chunk.row.session.spec.top_logprobs
        if top is not None and chunk.row.last:
            pieces.append(chunk.last)
            tops.append(top)
    return Asked(rows, depth, pieces, tops) if tops else None


def group_rows(
    verify: Sequence[VerifyRow], seats: Sequence[Seat], most_rows: Callable[[int], int]
) -> list[Group]:
    """Rows, each with its seat, by who judges them and whose drafts they verify; every row is in
    one group. `most_rows`: rows that a launch may have, by the most nodes of any of them."""
    if _all_plain(verify) and len(verify) <= most_rows(1):
        slots = RoundRows.plain([seat.slot for seat in seats])
        places = list(range(len(verify)))
        return [Group(places, list(verify), list(seats), slots, judge=_judge(seats))]
    kinds = [row.own_depth > 0 and seat.drafted for row, seat in zip(verify, seats, strict=True)]
    if len(kinds) == 1 or (kinds and all(kinds)):
        return [_group(list(range(len(kinds))), list(verify), list(seats), own=kinds[0])]
    groups: list[Group] = []
    for own in sorted(set(kinds)):
        alike = [place for place, other in enumerate(kinds) if other is own]
        for places in [alike] if own else _fitting(alike, verify, most_rows):
            rows = [verify[place] for place in places]
            groups.append(_group(places, rows, [seats[place] for place in places], own=own))
    return groups


def _group(places: list[int], rows: list[VerifyRow], seats: list[Seat], *, own: bool) -> Group:
    inputs = round_rows(rows, seats)
    if not own:
        # What is legal behind own drafts is known once these are.
        inputs = _masked(inputs, rows)
    drafts = Drafts.OWN if own else inputs.drafts
    return Group(places, rows, seats, inputs, drafts, _judge(seats))


def _all_plain(verify: Sequence[VerifyRow]) -> bool:
    """Whether there are rows, and none has a draft or is in a grammar."""
    for row in verify:
        if row.nodes or row.own_depth or row.session.constraint is not None:
            return False
    return bool(verify)


def _judge(seats: Sequence[Seat]) -> Judge:
    return Judge.MATCH if all([seat.plain for seat in seats]) else Judge.SAMPLED


def _fitting(
    places: list[int], verify: Sequence[VerifyRow], most_rows: Callable[[int], int]
) -> list[list[int]]:
    """Places by launch: all rows of one are padded to the nodes of its largest."""
    if len(places) <= most_rows(1 + max([verify[place].nodes for place in places])):
        return [places]
    left = sorted(places, key=lambda place: -verify[place].nodes)
    parts: list[list[int]] = []
    while left:
        count = most_rows(1 + verify[left[0]].nodes)
        parts.append(left[:count])
        left = left[count:]
    return parts


def round_rows(rows: Sequence[VerifyRow], seats: Sequence[Seat]) -> RoundRows:
    """What the device is told of rows."""
    slots = [seat.slot for seat in seats]
    if not any([row.nodes for row in rows]):
        return RoundRows.plain(slots)
    message = _message(rows)
    if message is None:
        return RoundRows.of([_row_input(*each) for each in zip(rows, seats, strict=True)])
    if len(rows) == 1 and rows[0].held is not None:
        nodes = message.nodes_of(rows[0].held.entry)
        count = message.node_counts[rows[0].held.entry :][:1]
        return RoundRows(slots, count, message.tokens[nodes], message.parents[nodes])
    drafts = message.only(np.array([row.held.entry for row in rows if row.held is not None]))
    counts = drafts.node_counts
    if len(counts) < len(rows):
        counts = np.array([row.nodes for row in rows], dtype=np.int64)
    return RoundRows(slots, counts, drafts.tokens, drafts.parents)


def _masked(inputs: RoundRows, rows: Sequence[VerifyRow]) -> RoundRows:
    """The same with what the sessions' grammars allow, where any is in one."""
    if not any([row.session.constraint is not None for row in rows]):
        return inputs
    return inputs._replace(legal=legal_masks([(row.session, row.draft) for row in rows]))


def _message(rows: Sequence[VerifyRow]) -> Proposals | None:
    """The message without laws that all drafts of these rows came in as they are; None if there is
    none."""
    held = [row.held for row in rows if row.held is not None]
    message = held[0].proposals if held else None
    if message is None or message.laws is not None or any([row.cut for row in rows]):
        return None
    return message if all([each.proposals is message for each in held]) else None


def _row_input(row: VerifyRow, seat: Seat) -> RowInput:
    if row.draft is None:
        return RowInput(seat.slot)
    return RowInput(seat.slot, row.draft.tree, None if seat.matching else row.draft.law)


def add_prompts(
    groups: list[Group],
    prefill: Sequence[tuple[int, PrefillRow, Seat]],
    *,
    own_head: bool,
    mixes: Callable[[Drafts], bool],
) -> None:
    """Let prompts, each with its place in the round and its seat, share a launch with the rows that
    decode, or have one of their own. `mixes`: whether they may share one with rows of such drafts.
    """
    if not prefill:
        return
    drafted = own_head and any(row.session.own_draft for _, row, _ in prefill)
    group = _shared([group for group in groups if mixes(group.drafts)], drafted=drafted)
    if group is None:
        drafts = Drafts.OWN if drafted else Drafts.NONE
        group = Group([], [], [], drafts=drafts, judge=Judge.MATCH)
        groups.append(group)
    if _judge([seat for _, _, seat in prefill]) is Judge.SAMPLED:
        group.judge = Judge.SAMPLED
    first = 0
    for place, row, seat in prefill:
        # Of a session that goes on the root is known, so no token is sampled before it.
        known = row.session.tokens[: row.session.length]
        chunk = Chunk(place, row, first, cut(seat.slot, known, row.start, row.end))
        if row.last and row.session.constraint is not None:
            legal = legal_masks([(row.session, None)])[0]
            chunk.pieces[-1] = chunk.pieces[-1]._replace(legal=legal)
        group.chunks.append(chunk)
        first += len(chunk.pieces)


def _shared(groups: Sequence[Group], *, drafted: bool) -> Group | None:
    """The launch that prompts join: the one with own drafts if they are to have such, else any."""
    own = [group for group in groups if group.own]
    if own or drafted:
        return own[0] if own else None
    return groups[0] if groups else None
