"""An own draft tree of a session in a grammar. Names as in `outrider_verifier.form_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL, allows
from outrider.grammar.walks import DraftTree, Walk, along
from outrider.spec.sampling import Rule
from outrider.spec.tree import ROOT
from outrider_verifier.packing import follow_output
from outrider_verifier.sessions import Session


class TreeWalk:
    """The first level is masked, once, if it has a token that the grammar does not allow."""

    def __init__(self, session: Session, slot: int, *, blank: bool) -> None:
        """`blank`: the row has no draft in this round."""
        self.slot = slot
        self.gain = 1.0
        """Of the draft, what is drafted again."""
        self.mended: NDArray[np.int32] | None = None
        """A tree is not."""
        self.to_mask: NDArray[np.uint32] | None = None
        """[1, W]: what is legal at the first level, if the head is to draft again."""
        self.constraint = follow_output(session)
        self._always = session.spec.sampling.effective_rule is Rule.REJECTION
        self._may_draft = not blank

    def read(self, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> Walk:
        """Walk along the draft, [n] each."""
        self.masks = np.full((1 + len(tokens), self.constraint.words), ALL, dtype=np.uint32)
        """[1 + n, W]: what may follow the root and each node."""
        yield from along(DraftTree(self.constraint, tokens, parents), self.masks)
        # What is drawn for the rejection rule is masked in any case, never by what came.
        first = tokens[parents == ROOT].tolist()
        fits = all(token >= 0 and allows(self.masks[0], token) for token in first)
        self.to_mask = self.masks[:1] if self._may_draft and (self._always or not fits) else None
        self._may_draft = False

    def end(self) -> Walk:
        """All that was read has been walked along."""
        yield from ()

    def close(self) -> None:
        """The walk has led back."""
