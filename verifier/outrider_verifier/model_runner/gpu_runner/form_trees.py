"""An own draft tree of a session in a grammar. Names as in
`outrider_verifier.model_runner.gpu_runner.grammar_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL_TOKENS
from outrider.grammar.draft_masks import ConstrainedTree, ConstraintWalk, walk_tree
from outrider_verifier.model_runner.batch import advance_grammar
from outrider_verifier.state.session import Session


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
