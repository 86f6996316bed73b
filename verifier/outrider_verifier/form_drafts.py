"""Drafts of the own head for sessions in a grammar: read, drawn again where they do not follow it,
and given the masks by which the launch verifies them.

n own drafts of a row, L levels that can be masked, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.form_drafts import FormDrafts
from outrider.grammar.constraint import ALL, allows
from outrider.spec.sampling import Rule
from outrider_verifier.device_groups import Group
from outrider_verifier.packing import legal_after
from outrider_verifier.sessions import Session


class _Walk:
    """A row's draft and what the grammar says of it."""

    def __init__(
        self, session: Session, slot: int, *, blank: bool, levels: int, words: int
    ) -> None:
        """`blank`: the row has no draft in this round; `levels`, `words`: L, W."""
        self.session, self.slot, self._blank = session, slot, blank
        self.levels = np.full((levels, words), ALL, dtype=np.uint32)
        """[L, W]: what the head may draft at each level."""
        self._masked = 0
        """Levels at which it has been told."""

    def read(self, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        """The draft, [n] each."""
        self._tokens, self._parents = tokens, parents
        self.masks = legal_after(self.session, tokens, parents)
        """[1 + n, W]: what may follow the root and each node."""

    def mask_more(self) -> bool:
        """Whether the head is to draft again, with masks for more levels than it had."""
        if self._blank or self._masked == len(self.levels):
            return False
        level = self._first_illegal()
        if self.session.spec.sampling.effective_rule is Rule.REJECTION:
            # This rule takes the draft for a draw from its law. It would not be one, were a draw
            # that does not fit repeated: the first level is masked in any case, no other ever is.
            level = 0
        if level is None or level < self._masked:
            # All fits, or nothing that would can be drafted there.
            return False
        self.levels[self._masked : level + 1] = self.masks[self._masked : level + 1]
        self._masked = level + 1
        return True

    def _first_illegal(self) -> int | None:
        """The first level that has a token which the grammar does not allow."""
        for level in range(len(self.levels)):
            here = self._tokens[self._parents == level - 1].tolist()
            if not all(token >= 0 and allows(self.masks[level], token) for token in here):
                return level
        return None


def follow_forms(group: Group, drafts: FormDrafts | None) -> None:
    """Let the own drafts of a launch follow the grammars that its sessions are in, and let it judge
    by these. Waits for the device if there are any."""
    places = [n for n, row in enumerate(group.rows) if row.session.constraint is not None]
    if drafts is None or not group.own or not places:
        return
    walks = [
        _Walk(
            group.rows[place].session,
            group.seats[place].slot,
            blank=place in group.blank,
            levels=drafts.levels,
            words=drafts.words,
        )
        for place in places
    ]
    _read(walks, drafts)
    while again := [walk for walk in walks if walk.mask_more()]:
        drafts.redraft([walk.slot for walk in again], np.stack([walk.levels for walk in again]))
        _read(again, drafts)
    legal: list[NDArray[np.uint32] | None] = [None] * len(group.rows)
    for place, walk in zip(places, walks, strict=True):
        legal[place] = walk.masks
    group.inputs = group.inputs._replace(legal=legal)


def _read(walks: Sequence[_Walk], drafts: FormDrafts) -> None:
    tokens, parents = drafts.read([walk.slot for walk in walks])
    for walk, *draft in zip(walks, tokens, parents, strict=True):
        walk.read(*draft)
