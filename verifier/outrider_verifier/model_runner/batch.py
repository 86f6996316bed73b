"""Rows of a round as arrays: token ids, positions, masks, and what acceptance must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.acceptance import AcceptRow
from outrider.grammar.constraint import Constraint
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.model_runner.rows import VerifyDraft, tree_mask
from outrider_verifier.state.session import Session

_NO_IDS: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillRow:
    """The next tokens of a session to be prefilled: of its prompt, or of all that it had."""

    session: Session
    start: int
    """Position of the first one."""
    num_tokens: int
    last: bool
    """Whether the prompt ends in this round, so that its first token is sampled. Never of what is
    prefilled again: the root behind it is known."""

    @classmethod
    def from_next_tokens(cls, session: Session, num_tokens: int) -> PrefillRow:
        """The first `num_tokens` of those that were not submitted yet."""
        return cls(
            session=session,
            start=session.prefill_sent,
            num_tokens=num_tokens,
            last=num_tokens == session.prefill_left and not session.emitted,
        )

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.start + self.num_tokens


class VerifyRow:
    """A session's root with the draft to verify, if any."""

    __slots__ = (
        "_draft",
        "cut",
        "drafted",
        "held",
        "in_process_depth",
        "ngram_fallback",
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
        ngram_fallback: bool = False,
    ) -> None:
        """`draft`: what to verify, where that is not all of `held`: a part of it or, if
        `ngram_fallback`, what was looked up instead. `in_process_depth`: how deep the draft that
        this process's own head made may stand, 0 verifies none of it."""
        self.session, self.held, self.in_process_depth = session, held, in_process_depth
        self.ngram_fallback = ngram_fallback
        self._draft = draft
        self.cut = draft is not None
        """Whether the draft is not what `held` has."""
        self.drafted = draft is not None or held is not None
        """Whether there is a draft that no head of this process made, if one without nodes."""
        self.nodes = 0
        """Of that draft."""
        if draft is not None:
            self.nodes = len(draft.tree.tokens)
        elif held is not None:
            self.nodes = held.nodes

    @property
    def draft(self) -> VerifyDraft | None:
        """That draft; made when it is first asked for."""
        if self._draft is None and self.held is not None:
            proposal = self.held.proposal
            self._draft = VerifyDraft(tree=proposal.tree, distribution=proposal.distribution)
        return self._draft


@dataclass(slots=True, eq=False)
class PackedRow:
    """One session's rows in the batch."""

    session: Session
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    start: int
    accept_row: AcceptRow | None
    committed_rows: list[int]
    """Rows to commit."""


def pack_batch(
    prefill: Sequence[PrefillRow], verify: Sequence[VerifyRow]
) -> tuple[list[PackedRow], list[int]]:
    """Rows in batch order, and the batch rows whose logits are needed."""
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
    """What acceptance must know of a session whose root's logits are at `logits_start`."""
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
    """uint32 [1 + N, W] of each row: what its session's grammar allows after its root and after the
    N nodes of its draft; None if it has none."""
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
    """The grammar of a session that is in one, moved on to what it has emitted."""
    constraint = session.constraint
    assert constraint is not None
    constraint.advance_to(session.tokens[session.spec.prompt_len : session.length])
    return constraint
