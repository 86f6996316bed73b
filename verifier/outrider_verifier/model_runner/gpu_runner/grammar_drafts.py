"""Drafts of the own head for sessions in a grammar: begun under masks as soon as it is known what
stands, chains drafted on level by level, and given the masks by which the launch verifies them.

n own drafts of a row, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.drafting.draft_masks import Masks
from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.grammar.constraint import Constraint, masks_along_drafts
from outrider.grammar.draft_masks import run_walks
from outrider_verifier.model_runner.gpu_runner.form_chains import (
    GrammarChain,
    grow_chains,
    request_masks,
)
from outrider_verifier.model_runner.gpu_runner.form_trees import GrammarTreeWalk
from outrider_verifier.model_runner.gpu_runner.launch_groups import LaunchGroup
from outrider_verifier.state.session import Session


class GrammarEmission(NamedTuple):
    """What a round emitted of a session in a grammar, for which the own head drafts."""

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
    """Let the own drafts of a launch follow the grammars that its sessions are in, and let it judge
    by these. Waits for the device if there are any."""
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
