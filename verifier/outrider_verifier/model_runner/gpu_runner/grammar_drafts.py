"""In-process drafts of sessions with a grammar: chains level by level, and trees.

Drafting begins under allowed-token masks as soon as the accepted tokens are known. Letters in
shapes: n in-process drafts of a row; W words of a mask.
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
    """A draft chain that is extended under the masks of its grammar.

    Where the grammar allows only one token, that token is the draft, whatever the head predicts.
    Under the rejection rule drafts must be drawn from their distribution: there no token is forced.
    """

    def __init__(self, session: Session) -> None:
        self.constraint = advance_grammar(session)
        """The grammar constraint, at the end of the chain."""
        self.tokens: list[int] = []
        """Draft tokens to verify."""
        self.masks: list[Mask] = []
        """Allowed-token masks after the root and after each token, as far as they are known."""
        self.given: int | None = None
        """The next token if the grammar forces it; else None."""
        self.is_open = True
        """Whether the chain can be extended."""
        self.is_known = True
        """Whether the chain on the device equals this one."""
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._entered = 0

    def set_mask(self, mask: Mask) -> None:
        """Set the mask of the tokens that may follow the chain."""
        self.masks.append(mask)
        self.given = None if self._drawn else single_id(mask)

    def extend_chain(self, drafted: int | None, drafts: GrammarDraftBuffer) -> None:
        """Extend the chain by the forced token or by the drafted token; `drafted` is None if its
        result has not been read yet. The chain ends at a token that the grammar does not allow,
        which the head drafts if its vocabulary has no allowed token."""
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
        """Return the allowed-token masks after the root and after each node, uint32 [1 + length,
        W]. Unknown masks allow every token, because no token is accepted there."""
        masks = np.full((1 + length, self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
        masks[: len(self.masks)] = self.masks
        return masks

    def padded_tokens(self, length: int) -> NDArray[np.int32]:
        """Return the draft tokens, padded with -1 to [length]."""
        tokens = np.full(length, -1, dtype=np.int32)
        tokens[: len(self.tokens)] = self.tokens
        return tokens

    def close(self) -> None:
        """Rewind the session's constraint to the accepted tokens."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0


def grow_chains(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> None:
    """Extend chains, by slot, to their ends while the device drafts, and upload the chains that
    differ from those on the device. Waits for the device where the host cannot know a token."""
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
    """Return the chains that differ from those on the device."""
    return {slot: chain for slot, chain in chains.items() if not chain.is_known}


def _tokens(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> NDArray[np.int32]:
    return np.stack([chain.padded_tokens(drafts.length) for chain in chains.values()])


def request_masks(chains: Collection[GrammarChain]) -> None:
    """Request the masks at the ends of these chains."""
    found = masks_along_drafts([(chain.constraint, ()) for chain in chains])
    for chain, along in zip(chains, found, strict=True):
        chain.set_mask(along.masks[0])


class GrammarTreeWalk:
    """Walk of a grammar constraint through a draft tree that is verified unchanged."""

    def __init__(
        self,
        session: Session,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        *,
        blank: bool,
    ) -> None:
        """Prepare the walk. `tokens` and `parents` describe the draft, int32 [n] each; a row that
        is `blank` has a tree without nodes."""
        self.constraint = advance_grammar(session)
        self.masks = np.full(
            (1 + len(tokens), self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32
        )
        """Allowed-token masks after the root and after each node, uint32 [1 + n, W]."""
        self._tree = ConstrainedTree(self.constraint, tokens, parents)

    def walk(self) -> ConstraintWalk:
        """Return the walk through the tree and back."""
        yield from walk_tree(self._tree, self.masks)


class GrammarEmission(NamedTuple):
    """Tokens that a round emitted for a session with a grammar and an in-process drafter."""

    session: Session
    slot: int
    tokens: Sequence[int]


def can_skip_drafts(group: LaunchGroup) -> bool:
    """Return whether the head may skip the drafts of a launch, because all its sessions with
    in-process drafts have a grammar and their drafts would be discarded."""
    # The first row mostly tells.
    return (
        group.has_in_process_drafts
        and all(row.session.constraint is not None for row in group.rows)
        and all(c.row.session.constraint is not None for c in group.prompts if c.row.last)
    )


def start_masked_drafts(
    emitted: Sequence[GrammarEmission], drafts: GrammarDraftBuffer, *, undrafted: bool = False
) -> None:
    """Launch drafts after the tokens that these sessions emitted, under the masks of their
    grammars: whole trees, or the first tokens of chains. Does not wait for the device, which drafts
    while the host commits the round. `undrafted` is whether the launch skipped all drafts."""
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
    """Restrict the in-process drafts and the acceptance of a launch to the grammars of its
    sessions. Waits for the device if any session has a grammar."""
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
    """Extend the chains of these rows and return their masks."""
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
    """Return the masks of the trees of these rows, which are verified unchanged."""
    trees = drafts.read_trees([group.device_slots[place].slot for place in places])
    walks = [
        GrammarTreeWalk(group.rows[place].session, *tree, blank=place in group.undrafted_rows)
        for place, *tree in zip(places, *trees, strict=True)
    ]
    run_walks([(walk.constraint, walk.walk()) for walk in walks])
    return [walk.masks for walk in walks]
