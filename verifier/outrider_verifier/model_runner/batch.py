"""Packs the rows of a round into one batch: token ids, positions, masks, acceptance inputs. Pure.

In shapes, N is the number of nodes of a row's draft tree. The first batch row of a decoding session
is its root, and row 1 + i is node i of its draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.acceptance import AcceptRow
from outrider.grammar.constraint import Constraint
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider.spec.draft_distribution import DraftDistribution, make_distribution
from outrider.spec.tree import DraftTree, ancestor_mask, depths, is_chain
from outrider.wire.messages import FinishReason
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.state.session import Session


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyDraft:
    """The part of a proposal that a round verifies."""

    tree: DraftTree
    distribution: DraftDistribution | None

    @property
    def depths(self) -> NDArray[np.int32]:
        """Depth of each node, int32 [N]; 1 for the first level."""
        return depths(self.tree.parents)


def trim_draft(
    tree: DraftTree, distribution: DraftDistribution | None, max_depth: int
) -> VerifyDraft:
    """Return the draft without nodes deeper than `max_depth`.

    The cut depends only on depths, never on tokens, so the rest of a sampled tree still follows its
    draft distribution.
    """
    # The depth of a node is at most the number of nodes.
    if len(tree.tokens) <= max_depth:
        return VerifyDraft(tree=tree, distribution=distribution)
    node_depths = depths(tree.parents)
    if len(tree.tokens) == 0 or int(node_depths.max()) <= max_depth:
        return VerifyDraft(tree=tree, distribution=distribution)
    kept = np.flatnonzero(node_depths <= max_depth).astype(np.int32)
    number = np.full(len(tree) + 1, -1, dtype=np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    # A kept node's parent is less deep, so it is kept; ROOT (-1) reads the last entry, -1.
    parents = number[tree.parents[kept]]
    trimmed = DraftTree(tree.tokens[kept], parents, tree.logprobs[kept])
    cut_distribution = None
    if distribution is not None:
        slots = {0: distribution.entries(0)} if len(kept) else {}
        slots |= {
            new + 1: distribution.entries(int(old) + 1)
            for new, old in enumerate(kept)
            if node_depths[old] < max_depth and len(distribution.entries(int(old) + 1)[0])
        }
        cut_distribution = make_distribution(len(kept), slots)
    return VerifyDraft(tree=trimmed, distribution=cut_distribution)


def tree_mask(tree: DraftTree) -> NDArray[np.bool_] | None:
    """Return the attention mask between the root and the nodes: bool [1 + N, 1 + N], with one line
    per query and True where it may attend. None for a chain, whose mask is causal."""
    if is_chain(tree.parents):
        return None
    count = len(tree)
    mask = np.zeros((count + 1, count + 1), dtype=np.bool_)
    mask[:, 0] = True
    mask[1:, 1:] = ancestor_mask(tree.parents)
    return mask


def truncate_emission(
    tokens: Sequence[int], *, stop_ids: frozenset[int], remaining: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut the tokens of a round after the first stop token and to at most `remaining` tokens.
    Return the remaining tokens and the finish reason, which is None if the session continues."""
    taken = tuple(tokens[:remaining])
    for index, token in enumerate(taken):
        if token in stop_ids:
            return taken[: index + 1], FinishReason.STOP_TOKEN
    return taken, FinishReason.LENGTH if len(taken) == remaining else None


_NO_IDS: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillRow:
    """Tokens that a round prefills for one session. They are a part of its prompt or, after a
    preemption, of its whole prefix."""

    session: Session
    start: int
    """Position of the first token."""
    num_tokens: int
    last: bool
    """Whether the prompt ends in this round, so that the first output token is sampled. It is False
    if the prefix is computed again, because the token after it is known."""

    @classmethod
    def from_next_tokens(cls, session: Session, num_tokens: int) -> PrefillRow:
        """Return a row with the next `num_tokens` tokens that were not submitted yet."""
        return cls(
            session=session,
            start=session.prefill.sent,
            num_tokens=num_tokens,
            last=num_tokens == session.prefill_left and not session.emitted,
        )

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


class VerifyRow:
    """A decoding session in a round: its root and, if there is one, the draft to verify."""

    __slots__ = (
        "_draft",
        "cut",
        "drafted",
        "held",
        "in_process_depth",
        "nodes",
        "session",
    )

    def __init__(
        self,
        session: Session,
        held: HeldProposal | None = None,
        *,
        draft: VerifyDraft | None = None,
        in_process_depth: int = 0,
    ) -> None:
        """Create the row. `draft` is the draft to verify if it is only a part of the proposal
        `held`. `in_process_depth` is the maximum depth of the in-process draft that may be
        accepted; 0 verifies no in-process draft."""
        self.session, self.held, self.in_process_depth = session, held, in_process_depth
        self._draft = draft
        self.cut = draft is not None
        """Whether the draft is only a part of the proposal."""
        self.drafted = draft is not None or held is not None
        """Whether the row has a draft that does not come from the in-process drafter. Such a draft
        may have no nodes."""
        self.nodes = 0
        """Number of nodes of the draft that does not come from the in-process drafter; 0 if there
        is none."""
        if draft is not None:
            self.nodes = len(draft.tree.tokens)
        elif held is not None:
            self.nodes = held.nodes

    @property
    def draft(self) -> VerifyDraft | None:
        """The draft that does not come from the in-process drafter, or None. It is built on first
        access."""
        if self._draft is None and self.held is not None:
            proposal = self.held.proposal
            self._draft = VerifyDraft(tree=proposal.tree, distribution=proposal.distribution)
        return self._draft


@dataclass(slots=True, eq=False)
class PackedRow:
    """The consecutive batch rows of one session, one row per token. `start` is the index of the
    first of them in the batch. `mask` is the attention mask between them; None means causal.
    `accept_row` is the input of acceptance; None if no token is sampled."""

    session: Session
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    start: int
    accept_row: AcceptRow | None
    committed_rows: list[int]
    """Indices, from 0, of those rows of the session whose KV is committed after the round."""


def pack_batch(
    prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
) -> tuple[list[PackedRow], list[int]]:
    """Pack the rows of a round into a batch. Return the packed rows, one per session in batch
    order, and the indices of the batch rows whose logits are needed."""
    packed: list[PackedRow] = []
    logit_rows: list[int] = []
    start = 0
    for chunk in prefill:
        row = pack_prefill_row(chunk, start, len(logit_rows))
        packed.append(row)
        start += len(row.token_ids)
        if row.accept_row is not None:
            logit_rows.append(start - 1)
    for verified in verify:
        row = _pack_verify(verified, start, len(logit_rows))
        packed.append(row)
        logit_rows.extend(range(start, start + len(row.token_ids)))
        start += len(row.token_ids)
    return packed, logit_rows


def pack_prefill_row(chunk: PrefillRow, start: int, logits_start: int) -> PackedRow:
    session, begin, end = chunk.session, chunk.start, chunk.end
    return PackedRow(
        session=session,
        token_ids=session.tokens[begin:end].astype(np.int64),
        positions=np.arange(begin, end, dtype=np.int64),
        mask=None,
        start=start,
        accept_row=make_accept_row(session, logits_start, None) if chunk.last else None,
        committed_rows=list(range(chunk.num_tokens)),
    )


def _pack_verify(row: VerifyRow, start: int, logits_start: int) -> PackedRow:
    session, draft = row.session, row.draft
    root_position = session.length - 1
    if draft is None:
        token_ids = np.array([session.root], dtype=np.int64)
        positions = np.array([root_position], dtype=np.int64)
        mask = None
    else:
        token_ids = np.concatenate(([session.root], draft.tree.tokens)).astype(np.int64)
        positions = np.concatenate(([0], draft.depths)).astype(np.int64) + root_position
        mask = tree_mask(draft.tree)
    return PackedRow(
        session=session,
        token_ids=token_ids,
        positions=positions,
        mask=mask,
        start=start,
        accept_row=make_accept_row(session, logits_start, draft),
        committed_rows=[],
    )


def make_accept_row(session: Session, logits_start: int, draft: VerifyDraft | None) -> AcceptRow:
    """Return the inputs of acceptance for a session. `logits_start` is the index of the root's
    logits."""
    spec = session.spec
    prompt_len = spec.prompt_len
    return AcceptRow(
        logits_start=logits_start,
        tree=None if draft is None else draft.tree,
        distribution=None if draft is None else draft.distribution,
        sampling=spec.sampling,
        position=session.length,
        prompt_ids=session.tokens[:prompt_len],
        output_ids=session.tokens[prompt_len : session.length],
        banned_now=spec.stop_token_ids if spec.min_new_tokens else (),
        banned_until=session.stops_from,
        allowed_tokens=allowed_token_masks([(session, draft)])[0],
    )


def allowed_token_masks(
    rows: Sequence[tuple[Session, VerifyDraft | None]],
) -> list[NDArray[np.uint32] | None]:
    """Return the allowed-token masks of each row: uint32 [1 + N, words per mask], with one mask for
    the token after the root and one for the token after each of the N nodes. The entry is None if
    the session has no constraint."""
    bound = [n for n, (session, _) in enumerate(rows) if session.constraint is not None]
    found: list[NDArray[np.uint32] | None] = [None] * len(rows)
    if bound:
        for n, masks in zip(bound, masks_of_trees([_tree(*rows[n]) for n in bound]), strict=True):
            found[n] = masks
    return found


def _tree(session: Session, draft: VerifyDraft | None) -> ConstrainedTree:
    constraint = advance_grammar(session)
    if draft is None:
        return ConstrainedTree(constraint, _NO_IDS, _NO_IDS)
    return ConstrainedTree(constraint, draft.tree.tokens, draft.tree.parents)


def advance_grammar(session: Session) -> Constraint:
    """Return the session's constraint, advanced to the emitted tokens. The session must have
    one."""
    constraint = session.constraint
    assert constraint is not None
    constraint.advance_to(session.tokens[session.spec.prompt_len : session.length])
    return constraint
