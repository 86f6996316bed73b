"""An own draft tree of a session in a grammar. Names as in
`outrider_verifier.model_runner.gpu_runner.grammar_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL
from outrider.grammar.draft_masks import DraftTree, Walk, along
from outrider_verifier.model_runner.batch import follow_output
from outrider_verifier.state.session import Session


class TreeWalk:
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
        self.constraint = follow_output(session)
        self.masks = np.full((1 + len(tokens), self.constraint.words), ALL, dtype=np.uint32)
        """[1 + n, W]: what may follow the root and each node."""
        self._tree = DraftTree(self.constraint, tokens, parents)

    def walk(self) -> Walk:
        """Through the tree and back."""
        yield from along(self._tree, self.masks)
