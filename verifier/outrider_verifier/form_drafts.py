"""Drafts of the own head for sessions in a grammar: drafted again under masks as soon as it is
known what stands, mended where they do not follow the grammar all the same, and given the masks by
which the launch verifies them.

n own drafts of a row, L levels that can be masked, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.draft_masks import Masks
from outrider.engine.device.form_drafts import FormDrafts
from outrider.grammar.constraint import Constraint, masks_along
from outrider.grammar.walks import side_by_side
from outrider_verifier.device_groups import Group
from outrider_verifier.form_chains import ChainWalk, is_drawn
from outrider_verifier.form_trees import TreeWalk
from outrider_verifier.sessions import Session


class Emitted(NamedTuple):
    """What a round emitted of a session in a grammar, for which the own head drafts."""

    session: Session
    slot: int
    tokens: Sequence[int]


def leaves_drafts_out(group: Group) -> bool:
    """Whether the head may leave out a launch's drafts: they would be thrown away, because every
    session of it is in a grammar."""
    bound = all([row.session.constraint is not None for row in group.rows])
    return group.own and bound and not group.chunks


def draft_under_masks(
    emitted: Sequence[Emitted], drafts: FormDrafts, *, undrafted: bool = False
) -> None:
    """Let the head draft again where the grammars' masks may change what it drafts: behind what
    these sessions emitted, along what must follow, up to the first place that is open. Does not
    wait for the device: it drafts while the host accounts for the round. `undrafted`: the launch
    has left all drafts out.

    The rejection rule takes a draft for a draw from its law: whether it is drawn again does not
    depend on what came.
    """
    open_: list[tuple[Emitted, Constraint, int]] = []
    wishes: list[tuple[Constraint, Sequence[int]]] = []
    try:
        for each in emitted:
            constraint = each.session.constraint
            if constraint is None or constraint.failed:
                continue
            open_.append((each, constraint, constraint.enter(each.tokens)))
            wishes.append((constraint, constraint.forced()[: drafts.levels]))
        found = [along.masks for along in masks_along(wishes)]
    finally:
        for _, constraint, count in open_:
            constraint.leave(count)
    told: dict[int, Masks | None] = {}
    for (each, _, count), masks in zip(open_, found, strict=True):
        # Where all must be as it is, the host writes it; behind its end nothing is drafted.
        given = drafts.are_chains and len(masks) > drafts.levels and not is_drawn(each.session)
        if count == len(each.tokens) and not given:
            told[each.slot] = masks
        elif undrafted:
            # The head has yet to see what stands.
            told[each.slot] = None
    if told:
        drafts.redraft(list(told), list(told.values()))


def follow_forms(group: Group, drafts: FormDrafts | None) -> None:
    """Let the own drafts of a launch follow the grammars that its sessions are in, and let it judge
    by these. Waits for the device if there are any."""
    places = [n for n, row in enumerate(group.rows) if row.session.constraint is not None]
    if drafts is None or not group.own or not places:
        return
    slots = [group.seats[place].slot for place in places]
    kind, read = (ChainWalk, drafts.chains) if drafts.are_chains else (TreeWalk, drafts.trees)
    walks = [
        kind(group.rows[place].session, *draft, blank=place in group.blank)
        for place, *draft in zip(places, *read(slots), strict=True)
    ]
    try:
        side_by_side([(walk.constraint, walk.walk()) for walk in walks])
    finally:
        for walk in walks:
            walk.close()
    legal: list[NDArray[np.uint32] | None] = [None] * len(group.rows)
    changed: list[tuple[int, NDArray[np.int32]]] = []
    for place, slot, walk in zip(places, slots, walks, strict=True):
        legal[place] = walk.masks
        if walk.mended is not None:
            group.cut[place] = int(np.count_nonzero(walk.mended >= 0))
            changed.append((slot, walk.mended))
    if changed:
        drafts.write([slot for slot, _ in changed], np.stack([mended for _, mended in changed]))
    group.inputs = group.inputs._replace(legal=legal)
