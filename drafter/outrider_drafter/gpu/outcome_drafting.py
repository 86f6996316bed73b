"""Drafts on the GPU for outcomes of the last scored proposals, with one launch for each shape.

A branch is the draft for one outcome. It has KV blocks of its own for everything that is not its
session's prefix, so the state of the session does not change. Letters in shapes: O outcomes; S
sessions; B branches of a bucket; R rows of a path; F scored places; H feature width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram, OutcomeRows
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shapes import bucket_for
from outrider.engine.device.transfer.buffers import DownloadBuffer, HostMirror
from outrider.spec.digest import extend_ragged
from outrider.spec.noise import prefix_keys
from outrider.spec.plan import MAX_DRAFT_TOKENS, default_depth
from outrider_drafter.gpu.batch import LaunchSessions
from outrider_drafter.gpu.draft_launcher import DraftLauncher, LaunchOutput
from outrider_drafter.gpu.draft_results import chain_lengths
from outrider_drafter.gpu.grammar_masks import DraftConstraintStates, draft_starts
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS, PagedDraftKV
from outrider_drafter.gpu.scoring_layout import Indices, OutcomePaths, ScoredRows
from outrider_drafter.gpu.shapes import (
    PATH_ROW_BUCKETS,
    TREES,
    DraftTreeShape,
    max_outcomes,
    max_path_rows,
    outcome_batch_sizes,
)
from outrider_drafter.proposers.interface import Outcome, OutcomeDrafts
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES

_LARGEST: Final = max(
    DraftTreeShape(nodes, top_k, default_depth(nodes)).draft_rows for nodes, top_k in TREES.items()
)
BLOCKS_PER_OUTCOME: Final = -(-(BLOCK_TOKENS - 1 + PATH_ROW_BUCKETS[-1] + _LARGEST) // BLOCK_TOKENS)
"""Number of KV blocks of a branch: for a copy of the prefix's partly filled block, the path to the
outcome, and the draft."""
SCRATCH_BLOCKS: Final = OUTCOME_BATCH_SIZES[-1] * BLOCKS_PER_OUTCOME
_OWN_ROWS: Final = BLOCKS_PER_OUTCOME * BLOCK_TOKENS
_MORE_THAN_DEPTHS: Final = MAX_DRAFT_TOKENS + 1
_WORDS: Final = 5
"""Number of int32 words for each branch besides its rows: two words of noise key, owner, count and
start."""


class ScoredSessions(NamedTuple):
    """Sessions whose pending proposals were scored, with the values needed to draft for outcomes of
    these proposals. A branch is the draft for one outcome. Arrays are [S], with one element for
    each session, except `rows`."""

    held_rows: ScoredRows
    rows: Indices
    """Index of each proposal's session in the arrays [S]. The array has one element for each
    proposal; the elements of proposals that were not scored are arbitrary."""
    members: LaunchSessions
    shapes: Sequence[DraftTreeShape]
    """All distinct draft shapes of the branches."""
    shape_of: Indices
    """Index in `shapes` of the shape of each session's branches."""
    depths: Indices
    """Number of levels of each session's branches."""
    draft_rows: Indices
    """Number of draft rows that each of the session's branches writes."""
    is_tree: NDArray[np.bool_]
    """Whether each session's branches are trees."""
    is_scored_as_chain: NDArray[np.bool_]
    """Whether each session's proposal was scored as a chain."""

    @classmethod
    def of_sessions(
        cls,
        places: ScoredRows,
        rows: Indices,
        members: LaunchSessions,
        shapes: Sequence[DraftTreeShape],
        of_chains: Sequence[bool],
    ) -> ScoredSessions:
        """Build the arrays. `places`: index of the scored features. `rows`: as in the field.
        `members`: the sessions. `shapes`: draft shape of each session's branches. `of_chains`:
        whether each session's proposal was scored as a chain."""
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
        return cls(
            held_rows=places,
            rows=rows,
            members=members,
            shapes=list(numbers),
            shape_of=np.array([numbers[shape] for shape in shapes]),
            depths=np.array([shape.depth for shape in shapes]),
            draft_rows=np.array([shape.draft_rows for shape in shapes]),
            is_tree=np.array([shape.top_k > 1 for shape in shapes]),
            is_scored_as_chain=np.array(of_chains),
        )


class _Found(NamedTuple):
    """Outcomes that can be drafted for; columns [O]."""

    rows: Indices
    """Index of each outcome's session in `ScoredSessions.members`."""
    paths: OutcomePaths
    starts: Indices
    """Draft position of the first row of the path."""
    rooms: Indices
    """Maximum number of draft levels after the outcome within the session's maximum length."""


class OutcomeBatch:
    """Static inputs of a launch that drafts for outcomes, filled from the host by one upload."""

    def __init__(self, padding: int, device: torch.device) -> None:
        """Allocate the buffers. `padding`: device slot for unused entries of a launch."""
        self._padding = padding
        most = OUTCOME_BATCH_SIZES[-1] * (_WORDS + 2 * PATH_ROW_BUCKETS[-1])
        self._mirror = HostMirror(most, device)

    def stage_outcomes(
        self,
        chosen: Indices,
        found: _Found | None,
        owners: Indices,
        keys: NDArray[np.uint64],
        *,
        size: int,
        num_rows: int,
    ) -> None:
        """Fill the host buffer for a launch of `size` drafts, each with `num_rows` rows for the
        path to its outcome. `chosen` [B]: indices of the outcomes in `found`. `owners` [B]: device
        slot of each outcome's session. `keys` [B]: random-number key of each draft. `found` is None
        for a launch without outcomes, as in a warm-up."""
        words = self._mirror.array
        # Keys come first, where 8-byte words are aligned.
        words[: 2 * size].view(np.int64)[: len(chosen)] = keys.view(np.int64)
        head = words[2 * size : _WORDS * size].reshape(3, size)
        rest = words[_WORDS * size : (_WORDS + 2 * num_rows) * size]
        tokens, sources = rest.reshape(2, size, num_rows)
        head[0], head[1:], tokens[:], sources[:] = self._padding, 0, -1, 0
        if found is not None:
            here, kept = len(chosen), min(found.paths.tokens.shape[1], num_rows)
            head[:, :here] = owners, found.paths.depths[chosen] + 1, found.starts[chosen]
            tokens[:here, :kept] = found.paths.tokens[chosen, :kept]
            sources[:here, :kept] = found.paths.rows[chosen, :kept]
            sources[:here, kept:] = found.paths.rows[chosen, :1]

    def upload(self, size: int, num_rows: int) -> OutcomeRows:
        """Upload the staged outcomes and return them as device tensors. The call may be captured in
        a CUDA graph. `size` and `num_rows`: as in `stage_outcomes`."""
        count = (_WORDS + 2 * num_rows) * size
        self._mirror.upload_int32s(count)
        sent = self._mirror.words[:count]
        head, rest = sent[2 * size : _WORDS * size].view(3, size), sent[_WORDS * size :]
        paths = rest.view(2, size, num_rows)
        return OutcomeRows(
            owners=head[0],
            counts=head[1],
            starts=head[2],
            tokens=paths[0],
            sources=paths[1],
            draft_keys=sent[: 2 * size].view(torch.int64),
        )


class OutcomeDrafter:
    """Drafts for outcomes of scored proposals with captured CUDA graphs."""

    def __init__(
        self,
        program: LookAheadProgram,
        rows: PagedDraftKV,
        grower: DraftLauncher,
        graphs: GraphCache,
        landing: DownloadBuffer,
        *,
        held: Tensor,
        max_context: int,
        bounded: bool,
        path_rows: tuple[int, ...],
    ) -> None:
        """Create a drafter. `rows` must have `SCRATCH_BLOCKS` scratch blocks. `held` [F, H]:
        features of the scored roots and nodes. `max_context` and `bounded`: see `GpuProposer`.
        `path_rows`: see `Buckets`."""
        self._program, self._rows, self._grower = program, rows, grower
        self._path_rows = path_rows
        self._graphs, self._landing, self._held = graphs, landing, held
        self._max_context, self._bounded = max_context, bounded
        device = rows.tables.device
        self._batch = OutcomeBatch(rows.padding, device)
        own = torch.tensor(rows.scratch, dtype=torch.int32, device=device)
        padding = torch.full(
            (OUTCOME_BATCH_SIZES[-1], 1), rows.scratch.start - 1, dtype=torch.int32
        )
        self._scratch = torch.cat((own.view(-1, BLOCKS_PER_OUTCOME), padding.to(device)), dim=1)
        """int32: KV blocks of each branch in a bucket, the last column the padding block; as in
        `LookAheadProgram.fork_outcomes`."""

    def warm_up(self, shape: DraftTreeShape, *, general: bool) -> None:
        """Compile and capture the graphs of a draft shape, one for each batch size."""
        none, keys = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
        for size in outcome_batch_sizes(shape):
            num_rows = max_path_rows(shape, self._path_rows)
            self._batch.stage_outcomes(none, None, none, keys, size=size, num_rows=num_rows)
            result, _ = self._launch(shape, size, num_rows, general=general)
            self._landing.wait_copy(result)

    def draft_outcomes(
        self, outcomes: Sequence[Outcome], branching: ScoredSessions
    ) -> Iterator[OutcomeDrafts]:
        """See `LookAheadProposer.draft_outcomes`."""
        lives, nodes, tokens = np.array(outcomes, dtype=np.int64).reshape(-1, 3).T
        rows, members = branching.rows[lives], branching.members
        paths = branching.held_rows.find_paths(lives, nodes, tokens)
        slots = members.slots[rows]
        found = _Found(
            rows=rows,
            paths=paths,
            starts=members.table.lengths[slots] - self._program.forward.first_token,
            rooms=members.table.draft_levels_left(slots) - paths.depths - 1,
        )
        for shape, chosen in self._groups(found, branching):
            most = max_outcomes(shape)
            for first in range(0, len(chosen), most):
                yield self._draft(shape, found, chosen[first : first + most], branching)

    def _groups(
        self, found: _Found, branching: ScoredSessions
    ) -> Iterator[tuple[DraftTreeShape, Indices]]:
        """Yield the outcomes that can be drafted for, grouped by draft shape. The shape of the
        first outcome comes first."""
        depths = branching.depths[found.rows]
        if not self._bounded:
            cut = np.minimum(depths, np.maximum(found.rooms, 1))
            depths = np.where(branching.is_tree[found.rows], cut, depths)
        first = found.starts + found.paths.depths + 1
        last = first + branching.draft_rows[found.rows]
        fit = found.paths.is_scored & (found.rooms > 0) & (last <= self._rows.capacity)
        fit &= first - 1 + np.minimum(depths, found.rooms) <= self._max_context
        fit &= last - found.starts // BLOCK_TOKENS * BLOCK_TOKENS <= _OWN_ROWS
        if self._program.forward.keeps_proposal_kv:
            # Paths through a tree would have to be run again, but chains have no graph for that.
            fit &= branching.is_scored_as_chain[found.rows] | branching.is_tree[found.rows]
        kinds = branching.shape_of[found.rows] * _MORE_THAN_DEPTHS + depths
        for kind in dict.fromkeys(kinds[fit].tolist()):
            number, depth = divmod(kind, _MORE_THAN_DEPTHS)
            shape = branching.shapes[number]._replace(depth=depth)
            yield shape, np.flatnonzero(fit & (kinds == kind))

    def _draft(
        self, shape: DraftTreeShape, found: _Found, chosen: Indices, branching: ScoredSessions
    ) -> OutcomeDrafts:
        rows, members = found.rows[chosen], branching.members
        size = bucket_for(len(chosen), outcome_batch_sizes(shape))
        deepest = bucket_for(int(found.paths.depths[chosen].max()) + 1, self._path_rows)
        num_rows = max(deepest, max_path_rows(shape, self._path_rows))
        self._batch.stage_outcomes(
            chosen,
            found,
            members.device_slots[rows],
            _keys(found, chosen, members) if shape.has_distribution else members.keys[rows],
            size=size,
            num_rows=num_rows,
        )
        sessions = [members.sessions[row] for row in rows.tolist()]
        starts: DraftConstraintStates = ()
        if members.has_grammar:
            starts = draft_starts(sessions, _tokens_of(found.paths, chosen))
        general = members.has_grammar or bool(branching.members.needs_general_graph[rows].any())
        if general:
            self._grower.set_masks(shape, starts, size)
        result, entries = self._launch(shape, size, num_rows, general=general)
        # While the device works.
        counts = chain_lengths(shape, members.wanted_nodes[rows], found.rooms[chosen])
        words = self._landing.wait_copy(result).numpy()
        drafted = self._grower.read_drafts(shape, sessions, counts, words, entries, starts)
        return OutcomeDrafts.of_drafts(chosen, drafted)

    def _launch(
        self, shape: DraftTreeShape, size: int, num_rows: int, *, general: bool
    ) -> LaunchOutput:
        def run() -> LaunchOutput:
            forked, drawing = self._program.fork_outcomes(
                self._batch.upload(size, num_rows),
                tables=self._rows.tables,
                scratch=self._scratch,
                held=self._held,
                counted=general,
                below_chains=shape.top_k == 1,
            )
            return self._grower.launch_draft(shape, forked, drawing, general=general)

        return self._graphs.run_graph(("branch", shape, size, num_rows, general), run)


def _tokens_of(paths: OutcomePaths, chosen: Indices) -> list[list[int]]:
    """Return the path of each chosen outcome, with the outcome's token last."""
    tokens, depths = paths.tokens[chosen].tolist(), paths.depths[chosen].tolist()
    return [path[: depth + 1] for path, depth in zip(tokens, depths, strict=True)]


def _keys(found: _Found, chosen: Indices, members: LaunchSessions) -> NDArray[np.uint64]:
    """Return the noise key of each branch, uint64 [B], which depends on the branch's prefix."""
    rows, counts = found.rows[chosen], found.paths.depths[chosen] + 1
    tokens = found.paths.tokens[chosen]
    flat = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
    digests = extend_ragged(members.table.digests[members.slots[rows]], counts, flat)
    return prefix_keys(members.keys[rows], digests)
