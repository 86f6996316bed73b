"""Which rows of a round share a launch on the device (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.engine.device.rounds import Launched
from outrider.engine.device.shapes import Drafts, Judge
from outrider.spec.sampling import Rule
from outrider.spec.tree import DraftTree, is_chain
from outrider_verifier.packing import VerifyRow
from outrider_verifier.rows import Draft, trim
from outrider_verifier.sessions import Session

MATCHING = (Rule.GREEDY, Rule.COUPLED)
"""Rules by which tokens are compared and no law is asked for."""


@dataclass(slots=True, eq=False)
class Seat:
    """A session's place on the device, and what of it decides how its rows are launched."""

    slot: int
    matching: bool
    """Whether its rule compares tokens and asks for no law."""
    warped: bool
    """Whether its logits are warped before anything looks at them."""
    drafted: bool = False
    """Whether the own draft on the device follows the session's prefix."""

    @classmethod
    def of(cls, session: Session, slot: int, *, warped: bool) -> Seat:
        """The seat of a session that begins in `slot`."""
        return cls(slot, session.spec.sampling.effective_rule in MATCHING, warped)


@dataclass(slots=True, eq=False)
class Group:
    """Rows of one launch, by their place in the round."""

    places: list[int]
    rows: list[VerifyRow]
    seats: list[Seat]
    drafts: Drafts = Drafts.NONE
    judge: Judge = Judge.HOST
    launched: Launched | None = None

    @property
    def own(self) -> bool:
        """Whether the rows verify drafts of this process's own head."""
        return self.drafts is Drafts.OWN

    @property
    def matching(self) -> bool:
        """Whether no row of the group needs laws."""
        return all(seat.matching for seat in self.seats)

    @property
    def plain(self) -> bool:
        """Whether tokens are compared, and by logits as they are."""
        return self.matching and not any(seat.warped for seat in self.seats)


def group_rows(verify: Sequence[VerifyRow], seats: Sequence[Seat]) -> list[Group]:
    """Rows, each with its seat, by who judges them and whose drafts they verify; every row is in
    one group."""
    kinds = [
        (judged_by_host(row), row.own_depth > 0 and seat.drafted)
        for row, seat in zip(verify, seats, strict=True)
    ]
    groups: list[Group] = []
    for kind in sorted(set(kinds)):
        places = [place for place, other in enumerate(kinds) if other == kind]
        on_host, own = kind
        rows = [verify[place] for place in places]
        group = Group(places, rows, [seats[place] for place in places])
        group.drafts = Drafts.OWN if own else drafts_of(rows)
        if not on_host:
            group.judge = Judge.MATCH if group.plain else Judge.SAMPLED
        groups.append(group)
    return groups


def judged_by_host(row: VerifyRow) -> bool:
    """Whether the row brings a law from outside."""
    return row.draft is not None and row.draft.law is not None


def own_drafts(rows: Sequence[VerifyRow], tokens: Tensor) -> list[Draft | None]:
    """The drafts that the device kept, as chains; tokens int32 [>= n, N], the root first."""
    drafts: list[Draft | None] = []
    for row, ids in zip(rows, tokens.numpy(), strict=False):
        tree = DraftTree.chain(ids[1:].astype(np.int32))
        drafts.append(trim(tree, None, row.own_depth))
    return drafts


def drafts_of(rows: Sequence[VerifyRow]) -> Drafts:
    """What the host's drafts of these rows have in common."""
    drafts = Drafts.NONE
    for row in rows:
        if row.draft is None or len(row.draft.tree.tokens) == 0:
            continue
        if not is_chain(row.draft.tree.parents):
            return Drafts.TREE
        drafts = Drafts.CHAIN
    return drafts
