"""Which rows of a round share a launch on the device (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import Tensor

from outrider.engine.device.rounds import Launched
from outrider.engine.device.shapes import Drafts, Judge
from outrider.spec.sampling import Rule
from outrider.spec.tree import DraftTree, is_chain
from outrider_verifier.engine import decided_by_host
from outrider_verifier.packing import VerifyRow
from outrider_verifier.rows import Draft, trim

MATCHING = (Rule.GREEDY, Rule.COUPLED)
"""Rules by which tokens are compared and no law is asked for."""


@dataclass(slots=True, eq=False)
class Group:
    """Rows of one launch, by their place in the round."""

    places: list[int]
    rows: list[VerifyRow]
    drafts: Drafts
    judge: Judge
    launched: Launched | None = None

    @property
    def own(self) -> bool:
        """Whether the rows verify drafts of this process's own head."""
        return self.drafts is Drafts.OWN


def group_rows(verify: Sequence[VerifyRow], uses_own: Callable[[VerifyRow], bool]) -> list[Group]:
    """Rows by who judges them and whose drafts they verify; every row in one group."""

    def kind(place: int) -> tuple[bool, bool]:
        return judged_by_host(verify[place]), uses_own(verify[place])

    groups: list[Group] = []
    places = sorted(range(len(verify)), key=kind)
    for (on_host, own), members in groupby(places, key=kind):
        chosen = list(members)
        rows = [verify[place] for place in chosen]
        drafts = Drafts.OWN if own else drafts_of(rows)
        groups.append(Group(chosen, rows, drafts, Judge.HOST if on_host else judge_of(rows)))
    return groups


def judged_by_host(row: VerifyRow) -> bool:
    """Whether the warper is beyond the device, or the row brings a law from outside."""
    law = row.draft is not None and row.draft.law is not None
    return law or decided_by_host(row.session)


def own_drafts(rows: Sequence[VerifyRow], tokens: Tensor) -> list[Draft | None]:
    """The drafts that the device kept, as chains; tokens int32 [>= n, N], the root first."""
    drafts: list[Draft | None] = []
    for row, ids in zip(rows, tokens.numpy(), strict=False):
        chain = ids[1:].astype(np.int32)
        tree = DraftTree(
            tokens=chain,
            parents=np.arange(-1, len(chain) - 1, dtype=np.int32),
            logprobs=np.zeros(len(chain), dtype=np.float32),
        )
        drafts.append(trim(tree, None, row.own_depth))
    return drafts


def drafts_of(rows: Sequence[VerifyRow]) -> Drafts:
    trees = [row.draft.tree for row in rows if row.draft is not None and len(row.draft.tree)]
    if not trees:
        return Drafts.NONE
    return Drafts.CHAIN if all(is_chain(tree.parents) for tree in trees) else Drafts.TREE


def judge_of(rows: Sequence[VerifyRow]) -> Judge:
    matching = all(row.session.spec.sampling.effective_rule in MATCHING for row in rows)
    return Judge.MATCH if matching else Judge.SAMPLED
