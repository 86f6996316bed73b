"""In-process drafts of sessions with a grammar: chains level by level, and trees.

Drafting begins under allowed-token masks as soon as the accepted tokens are known. n in-process
drafts of a row, W words of a mask.
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
        """Where the chain ends."""
        self.tokens: list[int] = []
        """What is to be verified."""
        self.masks: list[Mask] = []
        """What may follow the root and each token, as far as that is known."""
        self.given: int | None = None
        """The next token, if it is known before it is drafted."""
        self.is_open = True
        """Whether anything may be drafted behind it."""
        self.is_known = True
        """Whether the device has the same chain."""
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._entered = 0

    def set_mask(self, mask: Mask) -> None:
        """What may follow where the chain ends."""
        self.masks.append(mask)
        self.given = None if self._drawn else single_id(mask)

    def extend_chain(self, drafted: int | None, drafts: GrammarDraftBuffer) -> None:
        """Go on by what is given, or by what the head drafted; None: nobody has waited for that.
        The chain ends at what may not follow: the head has none of what may in its vocabulary."""
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
        """[1 + length, W]: what may follow the root and each node; anything where that is not
        known, for nothing can stand there."""
        masks = np.full((1 + length, self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
        masks[: len(self.masks)] = self.masks
        return masks

    def padded_tokens(self, length: int) -> NDArray[np.int32]:
        """[length], -1 from where there is nothing."""
        tokens = np.full(length, -1, dtype=np.int32)
        tokens[: len(self.tokens)] = self.tokens
        return tokens

    def close(self) -> None:
        """Lead the session's grammar back to what stands."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0


def grow_chains(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> None:
    """Let chains, by slot, whose first tokens are being drafted, grow to their ends, and the device
    have them as they are. Waits for what the host cannot know."""
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
    """Those that the device has not as they are."""
    return {slot: chain for slot, chain in chains.items() if not chain.is_known}


def _tokens(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> NDArray[np.int32]:
    return np.stack([chain.padded_tokens(drafts.length) for chain in chains.values()])


def request_masks(chains: Collection[GrammarChain]) -> None:
    """Have the masks of where these end."""
    found = masks_along_drafts([(chain.constraint, ()) for chain in chains])
    for chain, along in zip(chains, found, strict=True):
        chain.set_mask(along.masks[0])


class GrammarTreeWalk:
    """Through a tree that is verified as it is."""

    def __init__(
        self,
        session: Session,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        *,
        blank: bool,
    ) -> None:
        """The draft, int32 [n] each; a row that is `blank` has a tree without nodes."""
        self.constraint = advance_grammar(session)
        self.masks = np.full(
            (1 + len(tokens), self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32
        )
        """[1 + n, W]: what may follow the root and each node."""
        self._tree = ConstrainedTree(self.constraint, tokens, parents)

    def walk(self) -> ConstraintWalk:
        """Through the tree and back."""
        yield from walk_tree(self._tree, self.masks)


class GrammarEmission(NamedTuple):
    """What a round emitted of a session in a grammar, for which the in-process drafter drafts."""

    session: Session
    slot: int
    tokens: Sequence[int]


def can_skip_drafts(group: LaunchGroup) -> bool:
    """Whether the head may leave out a launch's drafts: they would be thrown away, because every
    session of it that is to be drafted for is in a grammar."""
    # The first row mostly tells.
    return (
        group.has_in_process_drafts
        and all(row.session.constraint is not None for row in group.rows)
        and all(c.row.session.constraint is not None for c in group.prompts if c.row.last)
    )


def start_masked_drafts(
    emitted: Sequence[GrammarEmission], drafts: GrammarDraftBuffer, *, undrafted: bool = False
) -> None:
    """Let the head draft behind what these sessions emitted, under the grammars' masks: trees, or
    the first tokens of chains. Does not wait for the device: it drafts while the host accounts for
    the round. `undrafted`: the launch has left all drafts out."""
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
    """Let the in-process drafts of a launch follow the grammars that its sessions are in, and let
    it judge by these. Waits for the device if there are any."""
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
    """Masks of the chains of the rows at these places, once these have grown."""
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
    """Masks of the trees of the rows at these places, which are verified as they are."""
    trees = drafts.read_trees([group.device_slots[place].slot for place in places])
    walks = [
        GrammarTreeWalk(group.rows[place].session, *tree, blank=place in group.undrafted_rows)
        for place, *tree in zip(places, *trees, strict=True)
    ]
    run_walks([(walk.constraint, walk.walk()) for walk in walks])
    return [walk.masks for walk in walks]
