"""Drafts of the own head for sessions in a grammar: read, mended where they do not follow it, and
given the masks by which the launch verifies them.

n own drafts of a row, L levels that can be masked, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.form_drafts import FormDrafts
from outrider.grammar.constraint import ALL
from outrider.grammar.walks import side_by_side
from outrider_verifier.device_groups import Group
from outrider_verifier.form_chains import ChainWalk
from outrider_verifier.form_trees import TreeWalk

Walk = ChainWalk | TreeWalk


def follow_forms(group: Group, drafts: FormDrafts | None) -> None:
    """Let the own drafts of a launch follow the grammars that its sessions are in, and let it judge
    by these. Waits for the device if there are any."""
    places = [n for n, row in enumerate(group.rows) if row.session.constraint is not None]
    if drafts is None or not group.own or not places:
        return
    kind = ChainWalk if drafts.chains else TreeWalk
    walks: list[Walk] = [
        kind(group.rows[place].session, group.seats[place].slot, blank=place in group.blank)
        for place in places
    ]
    try:
        _follow(walks, drafts)
    finally:
        for walk in walks:
            walk.close()
    legal: list[NDArray[np.uint32] | None] = [None] * len(group.rows)
    for place, walk in zip(places, walks, strict=True):
        legal[place] = walk.masks
        if walk.mended is not None:
            group.cut[place] = int(np.count_nonzero(walk.mended >= 0))
    group.inputs = group.inputs._replace(legal=legal)


def _follow(walks: Sequence[Walk], drafts: FormDrafts) -> None:
    _read(walks, drafts)
    while again := _worth_a_pass(walks):
        levels = np.full((len(again), drafts.levels, drafts.words), ALL, dtype=np.uint32)
        for legal, walk in zip(levels, again, strict=True):
            assert walk.to_mask is not None
            legal[: len(walk.to_mask)] = walk.to_mask
        drafts.redraft([walk.slot for walk in again], levels)
        _read(again, drafts)
    side_by_side([(walk.constraint, walk.end()) for walk in walks])
    changed = [walk for walk in walks if walk.mended is not None]
    if changed:
        tokens = [walk.mended for walk in changed if walk.mended is not None]
        drafts.write([walk.slot for walk in changed], np.stack(tokens))


def _worth_a_pass(walks: Sequence[Walk]) -> list[Walk]:
    """Those for which the head drafts again; none if that is not worth it.

    All rows wait for a pass, which takes as long as drafting did: a third of a round. What it gains
    is what these rows draft anew, of which most stands. So it pays where that is half of all.
    """
    again = [walk for walk in walks if walk.to_mask is not None]
    return again if 2.0 * sum(walk.gain for walk in again) >= len(walks) else []


def _read(walks: Sequence[Walk], drafts: FormDrafts) -> None:
    tokens, parents = drafts.read([walk.slot for walk in walks])
    side_by_side(
        [
            (walk.constraint, walk.read(*draft))
            for walk, *draft in zip(walks, tokens, parents, strict=True)
        ]
    )
