"""An own draft chain of a session in a grammar. Names as in `outrider_verifier.form_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL
from outrider.grammar.walks import ChainFit, Walk
from outrider.spec.sampling import Rule
from outrider_verifier.packing import follow_output
from outrider_verifier.sessions import Session


def is_drawn(session: Session) -> bool:
    """Whether the session's drafts are draws from a law."""
    return session.spec.sampling.effective_rule is Rule.REJECTION


class ChainWalk:
    """What of a chain fits stands, and the best that might have been drafted where it does not;
    what is open behind that is cut off.

    The rejection rule takes a draft for a draw from its law. It would not be one, were a draw that
    does not fit replaced: there nothing is changed.
    """

    def __init__(
        self,
        session: Session,
        tokens: NDArray[np.int32],
        others: NDArray[np.int32],
        *,
        blank: bool,
    ) -> None:
        """`tokens`: the draft, int32 [n]; `others`: what else might have been drafted, int32
        [n, A]; `blank`: the row has none in this round."""
        self.mended: NDArray[np.int32] | None = None
        """int32 [n]: what is to be verified instead; -1 from where there is nothing."""
        self.constraint = follow_output(session)
        self._tokens, self._blank = tokens, blank
        self._drawn = is_drawn(session)
        self._fit = ChainFit(self.constraint, others=others.tolist(), force=not self._drawn)

    @property
    def masks(self) -> NDArray[np.uint32]:
        """[1 + n, W]: what may follow the root and each node."""
        masks = np.full((1 + len(self._tokens), self.constraint.words), ALL, dtype=np.uint32)
        masks[: len(self._fit.masks)] = self._fit.masks
        return masks

    def walk(self) -> Walk:
        """Along the draft."""
        yield from self._fit.settle([] if self._blank else self._tokens.tolist())
        if self._blank or self._drawn:
            return
        kept = np.full(len(self._tokens), -1, dtype=np.int32)
        kept[: len(self._fit.tokens)] = self._fit.tokens
        self.mended = None if np.array_equal(kept, self._tokens) else kept

    def close(self) -> None:
        """Lead the session's grammar back to what stands."""
        self._fit.close()
