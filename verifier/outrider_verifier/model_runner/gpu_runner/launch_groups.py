"""Assigns the decode rows and prefill chunks of a round to GPU launches. Pure."""

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
    """Prompt tokens that one launch prefills for one session, split into prefill chunks."""

    round_index: int
    """Index of the prompt among the prompts of the round."""
    row: PrefillRow
    first_chunk: int
    """Index of the prompt's first chunk among all prefill chunks of the launch."""
    chunks: list[PrefillChunkInput]

    @property
    def last_chunk(self) -> int:
        """Index of the prompt's last chunk among all prefill chunks of the launch."""
        return self.first_chunk + len(self.chunks) - 1


@dataclass(slots=True, eq=False)
class LaunchGroup:
    """Decode rows and prompts that one GPU launch computes. `round_indices`, `rows` and
    `device_slots` have one entry for each decode row; `round_indices` holds its index in the
    round."""

    round_indices: list[int]
    rows: list[VerifyRow]
    device_slots: list[DeviceSlot]
    inputs: RoundRows = _NO_ROWS
    drafts: DraftKind = DraftKind.NONE
    acceptance_mode: AcceptanceMode = AcceptanceMode.SAMPLED
    prompts: list[PromptChunk] = field(default_factory=list)
    launched: LaunchedRound | None = None
    shm_link_id: int | None = None
    """Id of the exchange link to the drafter that may read the launch's features from shared
    memory; None if no drafter may."""
    undrafted_rows: frozenset[int] = frozenset()
    """Indices of the rows that have no in-process draft yet, in a launch that verifies such
    drafts."""
    draft_limits: dict[int, int] = field(default_factory=dict)
    """Maximum number of in-process draft nodes to verify, by index of the row. Rows without an
    entry verify all nodes."""

    @property
    def all_chunks(self) -> list[PrefillChunkInput]:
        """All prefill chunks of the launch, grouped by prompt."""
        return [piece for chunk in self.prompts for piece in chunk.chunks]

    @property
    def needs_features(self) -> bool:
        """Whether any session of the launch keeps features for its drafter."""
        return any_keeps_features([row.session for row in self.rows]) or any_keeps_features(
            [chunk.row.session for chunk in self.prompts]
        )

    @property
    def link_id(self) -> int | None:
        """Id of the exchange link that all sessions of the launch share; None if they do not all
        have the same link."""
        links = {row.session.link_id for row in self.rows}
        links |= {chunk.row.session.link_id for chunk in self.prompts}
        return links.pop() if len(links) == 1 else None

    @property
    def has_in_process_drafts(self) -> bool:
        """Whether the launch verifies drafts of the in-process drafter."""
        return self.drafts is DraftKind.IN_PROCESS


@dataclass(slots=True, eq=False)
class GpuInFlightRound:
    """A round that was submitted and whose results were not collected yet."""

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
    """Return the rows and chunks of a launch that need log-probabilities; None if no session
    requests any. `draft_levels` is the maximum depth of in-process drafts."""
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
    """Return launches for all decode rows. Rows that verify a draft of the in-process drafter are
    in launches of their own. All other rows, with a proposal or without a draft, may share a
    launch. `device_slots` holds the device slot of each row. `max_rows(n)` returns the maximum
    number of rows of a launch in which each row has at most n nodes; the root counts as a node."""
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
    """Return whether there is at least one row, and no row has a draft or a grammar."""
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
    """Distribute the rows with indices `places` over launches, and return the row indices of each
    launch. A launch pads all its rows to the nodes of its largest row."""
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
    """Return the device inputs of these rows: slots, drafts and draft distributions."""
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
    """Return `inputs` with the allowed-token masks of the sessions' grammars; return `inputs`
    unchanged if no session has a grammar."""
    if not any([row.session.constraint is not None for row in rows]):
        return inputs
    return inputs._replace(
        allowed_tokens=allowed_token_masks([(row.session, row.draft) for row in rows])
    )


def _message(rows: Sequence[VerifyRow]) -> Proposals | None:
    """Return the message from which all drafts of these rows come. Return None if there are several
    messages, if the message has draft distributions, or if a draft was shortened."""
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
    """Add prompts to one of the launches in `groups`, or append a launch for them. Each entry of
    `prefill` contains the index of the prompt in the round, the prompt, and its device slot.
    `mixes` is `ShapeFamily.allows_prefill`."""
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
    """Return the launch that the prompts join; None if they need a launch of their own. A launch
    with in-process drafts has precedence. `drafted` is whether the prompts need in-process
    drafts."""
    own = [group for group in groups if group.has_in_process_drafts]
    if own or drafted:
        return own[0] if own else None
    return groups[0] if groups else None
