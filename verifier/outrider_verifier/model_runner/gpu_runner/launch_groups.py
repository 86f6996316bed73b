"""Groups the rows and prefill chunks of a round into GPU launches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.engine.device.graphs.shapes import CHUNK_TOKENS, AcceptanceMode, DraftKind
from outrider.engine.device.inputs.prefill_chunks import PrefillChunkInput, cut_chunks
from outrider.engine.device.inputs.round_rows import RoundRow, RoundRows
from outrider.engine.device.logprobs import LogprobRequest
from outrider.engine.device.round_launcher import LaunchedRound
from outrider.wire.messages import Proposals
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow, allowed_token_masks
from outrider_verifier.model_runner.gpu_runner.device_slots import DeviceSlot
from outrider_verifier.state.session import any_keeps_features

_NO_ROWS: Final = RoundRows.of_rows([])


@dataclass(slots=True, eq=False)
class PromptChunk:
    """Prompt tokens of a session, as prefill chunks of a launch."""

    round_index: int
    """Index in the round's prompts."""
    row: PrefillRow
    first_chunk: int
    """Index of the first prefill chunk in the launch."""
    chunks: list[PrefillChunkInput]

    @property
    def last_chunk(self) -> int:
        """Index of the last prefill chunk in the launch."""
        return self.first_chunk + len(self.chunks) - 1


@dataclass(slots=True, eq=False)
class LaunchGroup:
    """Rows of one launch, by their index in the round."""

    round_indices: list[int]
    rows: list[VerifyRow]
    device_slots: list[DeviceSlot]
    inputs: RoundRows = _NO_ROWS
    drafts: DraftKind = DraftKind.NONE
    acceptance_mode: AcceptanceMode = AcceptanceMode.SAMPLED
    prompts: list[PromptChunk] = field(default_factory=list)
    launched: LaunchedRound | None = None
    shm_link_id: int | None = None
    """Link of the drafter that may read the launch's features from shared memory."""
    undrafted_rows: frozenset[int] = frozenset()
    """Rows of a launch with in-process drafts that have no draft yet."""
    draft_limits: dict[int, int] = field(default_factory=dict)
    """Number of in-process draft nodes to verify, by row. Rows that verify all nodes are not
    included."""

    @property
    def all_chunks(self) -> list[PrefillChunkInput]:
        """All prefill chunks, prompt by prompt."""
        return [piece for chunk in self.prompts for piece in chunk.chunks]

    @property
    def needs_features(self) -> bool:
        """Whether any session of the launch keeps features."""
        return any_keeps_features([row.session for row in self.rows]) or any_keeps_features(
            [chunk.row.session for chunk in self.prompts]
        )

    @property
    def link_id(self) -> int | None:
        """Link of the only drafter that receives features of the launch; None if there are several
        or none."""
        links = {row.session.link_id for row in self.rows}
        links |= {chunk.row.session.link_id for chunk in self.prompts}
        return links.pop() if len(links) == 1 else None

    @property
    def has_in_process_drafts(self) -> bool:
        """Whether the rows verify drafts of this process's in-process drafter."""
        return self.drafts is DraftKind.IN_PROCESS


@dataclass(slots=True, eq=False)
class GpuInFlightRound:
    """A submitted round that was not collected yet."""

    prefill: Sequence[PrefillRow]
    verify: Sequence[VerifyRow]
    groups: list[LaunchGroup]
    submitted: float
    """Time of submission, on the clock of `time.perf_counter`."""

    @property
    def launched_at(self) -> float:
        """Time at which the first launch was queued on the device."""
        launched = self.groups[0].launched if self.groups else None
        return self.submitted if launched is None else launched.launched_at


def requested_logprobs(group: LaunchGroup, draft_levels: int) -> LogprobRequest | None:
    """Return which tokens of a launch need log-probabilities; None if no session requests them.
    `draft_levels` is the maximum depth of in-process drafts."""
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
        depth = max(depth, 1 + deepest, 1 + (draft_levels if group.has_in_process_drafts else 0))
    chunks: list[int] = []
    for chunk in group.prompts:
        top = chunk.row.session.spec.top_logprobs
        if top is not None and chunk.row.last:
            chunks.append(chunk.last_chunk)
            tops.append(top)
    return LogprobRequest(rows, depth, chunks, tops) if tops else None


def group_rows(
    verify: Sequence[VerifyRow], device_slots: Sequence[DeviceSlot], max_rows: Callable[[int], int]
) -> list[LaunchGroup]:
    """Group rows, each with its device slot, by their method of acceptance and by the source of
    their drafts; every row is in one group. `max_rows` returns the maximum number of rows of a
    launch for the largest number of nodes of any of its rows."""
    if _all_plain(verify) and len(verify) <= max_rows(1):
        slots = RoundRows.without_drafts([slot.slot for slot in device_slots])
        places = list(range(len(verify)))
        return [
            LaunchGroup(
                places,
                list(verify),
                list(device_slots),
                slots,
                acceptance_mode=_judge(device_slots),
            )
        ]
    workload_classes = [
        row.in_process_depth > 0 and slot.has_current_draft
        for row, slot in zip(verify, device_slots, strict=True)
    ]
    if len(workload_classes) == 1 or (workload_classes and all(workload_classes)):
        return [
            _group(
                list(range(len(workload_classes))),
                list(verify),
                list(device_slots),
                own=workload_classes[0],
            )
        ]
    groups: list[LaunchGroup] = []
    for own in sorted(set(workload_classes)):
        alike = [place for place, other in enumerate(workload_classes) if other is own]
        for places in [alike] if own else _fitting(alike, verify, max_rows):
            rows = [verify[place] for place in places]
            groups.append(_group(places, rows, [device_slots[place] for place in places], own=own))
    return groups


def _group(
    places: list[int], rows: list[VerifyRow], device_slots: list[DeviceSlot], *, own: bool
) -> LaunchGroup:
    inputs = round_rows(rows, device_slots)
    if not own:
        # What is allowed behind in-process drafts is known once these are.
        inputs = _masked(inputs, rows)
    drafts = DraftKind.IN_PROCESS if own else inputs.draft_kind
    return LaunchGroup(places, rows, device_slots, inputs, drafts, _judge(device_slots))


def _all_plain(verify: Sequence[VerifyRow]) -> bool:
    """Return whether there are rows, and none of them has a draft or a grammar."""
    for row in verify:
        if row.nodes or row.in_process_depth or row.session.constraint is not None:
            return False
    return bool(verify)


def _judge(device_slots: Sequence[DeviceSlot]) -> AcceptanceMode:
    if all([slot.is_plain for slot in device_slots]):
        return AcceptanceMode.MATCH
    if any([slot.uses_rejection for slot in device_slots]):
        return AcceptanceMode.REJECTION
    return AcceptanceMode.SAMPLED


def _fitting(
    places: list[int], verify: Sequence[VerifyRow], max_rows: Callable[[int], int]
) -> list[list[int]]:
    """Return the indices of the rows of each launch; all rows of a launch are padded to the nodes
    of its largest row."""
    if len(places) <= max_rows(1 + max([verify[place].nodes for place in places])):
        return [places]
    left = sorted(places, key=lambda place: -verify[place].nodes)
    parts: list[list[int]] = []
    while left:
        count = max_rows(1 + verify[left[0]].nodes)
        parts.append(left[:count])
        left = left[count:]
    return parts


def round_rows(rows: Sequence[VerifyRow], device_slots: Sequence[DeviceSlot]) -> RoundRows:
    """Return the inputs of rows for the device."""
    slots = [slot.slot for slot in device_slots]
    if not any([row.nodes for row in rows]):
        return RoundRows.without_drafts(slots)
    message = _message(rows)
    if message is None:
        return RoundRows.of_rows(
            [_row_input(*each) for each in zip(rows, device_slots, strict=True)]
        )
    if len(rows) == 1 and rows[0].held is not None:
        nodes = message.nodes_of(rows[0].held.entry)
        count = message.node_counts[rows[0].held.entry :][:1]
        return RoundRows(slots, count, message.tokens[nodes], message.parents[nodes])
    drafts = message.select(np.array([row.held.entry for row in rows if row.held is not None]))
    counts = drafts.node_counts
    if len(counts) < len(rows):
        counts = np.array([row.nodes for row in rows], dtype=np.int64)
    return RoundRows(slots, counts, drafts.tokens, drafts.parents)


def _masked(inputs: RoundRows, rows: Sequence[VerifyRow]) -> RoundRows:
    """Return the inputs with the allowed-token masks of the sessions' grammars, if any session has
    one."""
    if not any([row.session.constraint is not None for row in rows]):
        return inputs
    return inputs._replace(
        allowed_tokens=allowed_token_masks([(row.session, row.draft) for row in rows])
    )


def _message(rows: Sequence[VerifyRow]) -> Proposals | None:
    """Return the message that holds exactly the drafts of these rows, without distributions; None
    if there is no such message."""
    held = [row.held for row in rows if row.held is not None]
    message = held[0].proposals if held else None
    if message is None or message.distributions is not None or any([row.cut for row in rows]):
        return None
    return message if all([each.proposals is message for each in held]) else None


def _row_input(row: VerifyRow, device_slot: DeviceSlot) -> RoundRow:
    if row.draft is None:
        return RoundRow(device_slot.slot)
    return RoundRow(
        device_slot.slot,
        row.draft.tree,
        None if device_slot.uses_token_matching else row.draft.distribution,
    )


def add_prompts(
    groups: list[LaunchGroup],
    prefill: Sequence[tuple[int, PrefillRow, DeviceSlot]],
    *,
    in_process_drafter: bool,
    mixes: Callable[[DraftKind, int, int], bool],
) -> None:
    """Add prompts, each with its index in the round and its device slot, to a launch of decoding
    rows, or to a launch of their own. `mixes` is `ShapeFamily.allows_prefill`."""
    if not prefill:
        return
    drafted = in_process_drafter and any(
        row.session.in_process_draft_length for _, row, _ in prefill
    )
    chunks = sum([-(-row.num_tokens // CHUNK_TOKENS) for _, row, _ in prefill])
    fitting = [each for each in groups if mixes(each.drafts, 1 + each.inputs.max_nodes, chunks)]
    group = _shared(fitting, drafted=drafted)
    if group is None:
        drafts = DraftKind.IN_PROCESS if drafted else DraftKind.NONE
        group = LaunchGroup([], [], [], drafts=drafts)
        groups.append(group)
    prompt_slots = [device_slot for _, _, device_slot in prefill]
    group.acceptance_mode = _judge([*group.device_slots, *prompt_slots])
    first = 0
    for place, row, device_slot in prefill:
        # Of a session that goes on the root is known, so no token is sampled before it.
        known = row.session.tokens[: row.session.length]
        chunk = PromptChunk(
            place, row, first, cut_chunks(device_slot.slot, known, row.start, row.end)
        )
        if row.last and row.session.constraint is not None:
            allowed_tokens = allowed_token_masks([(row.session, None)])[0]
            chunk.chunks[-1] = chunk.chunks[-1]._replace(allowed=allowed_tokens)
        group.prompts.append(chunk)
        first += len(chunk.chunks)


def _shared(groups: Sequence[LaunchGroup], *, drafted: bool) -> LaunchGroup | None:
    """Return the launch that prompts join: the one with in-process drafts if the prompts need them,
    else any."""
    own = [group for group in groups if group.has_in_process_drafts]
    if own or drafted:
        return own[0] if own else None
    return groups[0] if groups else None
