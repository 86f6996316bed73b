"""Restricts in-process drafts to the grammars of their sessions, for chains and for trees.

A chain is drafted one level after the other: the mask of a level is known once the token before it
is known. Letters in shapes: n is the number of in-process draft tokens of a row; W is the number of
32-bit words of an allowed-token mask.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.drafting.draft_masks import Masks
from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.grammar.constraint import (
    ALL_TOKENS,
    Constraint,
    Mask,
    is_allowed,
    masks_along_drafts,
    single_id,
)
from outrider.grammar.draft_masks import ConstrainedTree, ConstraintWalk, run_walks, walk_tree
from outrider.spec.sampling import Rule
from outrider_verifier.model_runner.batch import advance_grammar
from outrider_verifier.model_runner.gpu_runner.launch_groups import LaunchGroup
from outrider_verifier.state.session import Session


class GrammarChain:
    """A draft chain of one session, extended token by token under the session's grammar.

    If the grammar allows only one next token, this token becomes the draft token, and the head's
    token is ignored. The rejection rule is an exception: its draft tokens must be drawn from the
    draft distribution, so the head's token is always used.
    """

    def __init__(self, session: Session) -> None:
        self.constraint = advance_grammar(session)
        """Grammar state after the last token of the chain."""
        self.tokens: list[int] = []
        """Draft tokens of the chain that the round verifies."""
        self.masks: list[Mask] = []
        """Allowed-token masks that are known so far: after the root, then after each token."""
        self.given: int | None = None
        """Next token if the grammar allows only one and the chain may use it; else None."""
        self.is_open = True
        """Whether another token can be appended."""
        self.is_known = True
        """Whether the copy of the chain on the device is equal to this chain."""
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._entered = 0

    def set_mask(self, mask: Mask) -> None:
        """Append the mask of the tokens that may follow the chain."""
        self.masks.append(mask)
        self.given = None if self._drawn else single_id(mask)

    def extend_chain(self, drafted: int | None, drafts: GrammarDraftBuffer) -> None:
        """Append the next token: the one that the grammar forces, or else `drafted`, the head's
        token. `drafted` may be None if the token is forced. If the grammar does not allow the
        head's token, nothing is appended and the chain ends; this happens if no token of the head's
        vocabulary is allowed."""
        token = drafted if self.given is None else self.given
        assert token is not None
        inside = 0 <= token < self.constraint.vocab_size
        if not inside or not is_allowed(self.masks[-1], token):
            # A draw stays what it is, and is rejected.
            self.is_open, self.is_known = False, self._drawn
            return
        self.tokens.append(token)
        self.is_known = self.given is None or drafts.has_token(token)
        entered = self.constraint.push_tokens([token])
        self._entered += entered
        self.is_open = entered > 0

    def padded_masks(self, length: int) -> NDArray[np.uint32]:
        """Return the allowed-token masks after the root and after each of `length` draft tokens,
        uint32 [1 + length, W]. A mask that is unknown allows every token, which is safe because no
        token is accepted at its position."""
        masks = np.full((1 + length, self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
        masks[: len(self.masks)] = self.masks
        return masks

    def padded_tokens(self, length: int) -> NDArray[np.int32]:
        """Return the draft tokens, int32 [length]; -1 follows the last token."""
        tokens = np.full(length, -1, dtype=np.int32)
        tokens[: len(self.tokens)] = self.tokens
        return tokens

    def close(self) -> None:
        """Rewind the grammar state of the session to the accepted tokens."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0


def grow_chains(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> None:
    """Extend chains until they end or are full, while the device drafts, and upload those that
    differ from their copies on the device. `chains` maps device slots to chains. Waits for the
    device where a token depends on the head's result."""
    open_ = dict(chains)
    for level in range(drafts.length):
        waits = any([chain.given is None for chain in open_.values()])
        drafted = drafts.read_chains() if waits else {}
        for slot, chain in open_.items():
            chain.extend_chain(drafted.get(slot), drafts)
        open_ = {slot: chain for slot, chain in open_.items() if chain.is_open}
        if not open_:
            break
        request_masks(open_.values())
        if level + 1 < drafts.length:
            if unknown := _unknown(open_):
                drafts.replace_tokens(list(unknown), _tokens(unknown, drafts), level)
            for chain in open_.values():
                chain.is_known = True
            masks = [chain.masks[-1][None] for chain in open_.values()]
            drafts.choose_level(list(open_), level + 1, masks)
    if unknown := _unknown(chains):
        drafts.write_chains(list(unknown), _tokens(unknown, drafts))


def _unknown(chains: Mapping[int, GrammarChain]) -> dict[int, GrammarChain]:
    """Return the entries of `chains` whose chain differs from its copy on the device."""
    return {slot: chain for slot, chain in chains.items() if not chain.is_known}


def _tokens(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> NDArray[np.int32]:
    return np.stack([chain.padded_tokens(drafts.length) for chain in chains.values()])


def request_masks(chains: Collection[GrammarChain]) -> None:
    """Compute the allowed-token mask at the end of each chain, and append it to the chain."""
    found = masks_along_drafts([(chain.constraint, ()) for chain in chains])
    for chain, along in zip(chains, found, strict=True):
        chain.set_mask(along.masks[0])


class GrammarTreeWalk:
    """Computes the allowed-token masks of a draft tree. The grammar does not change the tree."""

    def __init__(
        self,
        session: Session,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        *,
        blank: bool,
    ) -> None:
        """Prepare the walk through a tree of n nodes. `tokens` and `parents` hold the token and the
        parent index of each node, int32 [n]. `blank` is whether the round has no draft of this
        session."""
        self.constraint = advance_grammar(session)
        self.masks = np.full(
            (1 + len(tokens), self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32
        )
        """Allowed-token masks after the root and after each node, uint32 [1 + n, W]."""
        self._tree = ConstrainedTree(self.constraint, tokens, parents)

    def walk(self) -> ConstraintWalk:
        """Return a generator that walks the constraint through the tree, fills `masks`, and returns
        the constraint to the root."""
        yield from walk_tree(self._tree, self.masks)


class GrammarEmission(NamedTuple):
    """Tokens that a round emitted for one session with a grammar and an in-process drafter."""

    session: Session
    slot: int
    tokens: Sequence[int]


def can_skip_drafts(group: LaunchGroup) -> bool:
    """Return whether the launch need not draft after its tokens: all its sessions with in-process
    drafts have a grammar, so drafts made without masks would be discarded."""
    # The first row mostly tells.
    return (
        group.has_in_process_drafts
        and all(row.session.constraint is not None for row in group.rows)
        and all(c.row.session.constraint is not None for c in group.prompts if c.row.last)
    )


def start_masked_drafts(
    emitted: Sequence[GrammarEmission], drafts: GrammarDraftBuffer, *, undrafted: bool = False
) -> None:
    """Launch the next drafts of sessions with a grammar, under allowed-token masks: whole trees, or
    the first token of each chain. `emitted` holds the tokens that the round emitted for these
    sessions, and `undrafted` is whether its launch skipped all drafts. Does not wait for the
    device, so the host can commit the round while the device drafts."""
    told: dict[int, Masks | None] = {}
    asked: list[tuple[int, Constraint]] = []
    for each in emitted:
        constraint = each.session.constraint
        if constraint is None or constraint.failure:
            continue
        count = constraint.push_tokens(each.tokens)
        if count == len(each.tokens):
            asked.append((each.slot, constraint))
            told[each.slot] = None
            continue
        constraint.pop_tokens(count)
        if undrafted:
            # The session ends, or is in no good state; the head goes on all the same.
            told[each.slot] = None
    found = masks_along_drafts([(constraint, ()) for _, constraint in asked])
    for (slot, constraint), along in zip(asked, found, strict=True):
        constraint.commit_tokens()
        told[slot] = along.masks
    if told:
        drafts.start_drafts(list(told), list(told.values()), seen=undrafted)


def apply_grammars(group: LaunchGroup, drafts: GrammarDraftBuffer | None) -> None:
    """Apply the grammars of a launch's sessions to their in-process drafts, and set the
    allowed-token masks of acceptance. Waits for the device if any session has a grammar."""
    if drafts is None or not group.has_in_process_drafts:
        return
    places = [n for n, row in enumerate(group.rows) if row.session.constraint is not None]
    if not places:
        return
    found = (_chains if drafts.are_chains else _trees)(group, places, drafts)
    allowed_tokens: list[NDArray[np.uint32] | None] = [None] * len(group.rows)
    for place, masks in zip(places, found, strict=True):
        allowed_tokens[place] = masks
    group.inputs = group.inputs._replace(allowed_tokens=allowed_tokens)


def _chains(
    group: LaunchGroup, places: Sequence[int], drafts: GrammarDraftBuffer
) -> list[NDArray[np.uint32]]:
    """Extend the chains of the rows with indices `places`, and return the masks of each row, uint32
    [1 + n, W]."""
    chains = {place: GrammarChain(group.rows[place].session) for place in places}
    growing = {
        group.device_slots[place].slot: chain
        for place, chain in chains.items()
        if place not in group.undrafted_rows
    }
    try:
        request_masks(chains.values())
        if growing and not drafts.has_started(list(growing)):
            # Some sat a round out.
            drafts.start_drafts(list(growing), [chain.masks[0][None] for chain in growing.values()])
        grow_chains(growing, drafts)
    finally:
        for chain in chains.values():
            chain.close()
    for place, chain in chains.items():
        if place not in group.undrafted_rows and len(chain.tokens) < drafts.length:
            group.draft_limits[place] = len(chain.tokens)
    return [chain.padded_masks(drafts.length) for chain in chains.values()]


def _trees(
    group: LaunchGroup, places: Sequence[int], drafts: GrammarDraftBuffer
) -> list[NDArray[np.uint32]]:
    """Return the allowed-token masks for the draft trees of the rows with indices `places`, uint32
    [1 + n, W] for each row. The trees are verified unchanged."""
    trees = drafts.read_trees([group.device_slots[place].slot for place in places])
    walks = [
        GrammarTreeWalk(group.rows[place].session, *tree, blank=place in group.undrafted_rows)
        for place, *tree in zip(places, *trees, strict=True)
    ]
    run_walks([(walk.constraint, walk.walk()) for walk in walks])
    return [walk.masks for walk in walks]
