"""An own draft chain of a session in a grammar. Names as in `outrider_verifier.form_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL
from outrider.grammar.walks import ChainFit, Walk
from outrider.spec.sampling import Rule
from outrider_verifier.packing import follow_output
from outrider_verifier.sessions import Session


class ChainWalk:
    """What of a chain fits stands; what is open behind that is drafted again, or cut off.

    The rejection rule takes a draft for a draw from its law. It would not be one, were a draw that
    does not fit replaced or repeated: there the first level is masked in any case, once, and
    nothing else is changed.
    """

    def __init__(self, session: Session, slot: int, *, blank: bool) -> None:
        """`blank`: the row has no draft in this round."""
        self.slot = slot
        self.to_mask: NDArray[np.uint32] | None = None
        """[<= L, W]: what is legal at the first levels, if the head is to draft again."""
        self.gain = 0.0
        """Of the draft, the share that would be drafted again."""
        self.mended: NDArray[np.int32] | None = None
        """[n]: what is to be verified instead of what the head drafted; -1 from where there is
        nothing."""
        self.constraint = follow_output(session)
        self._blank = blank
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._fit = ChainFit(self.constraint, force=not self._drawn)
        self._tokens: list[int] = []
        """[n]: as read last."""
        self._masked = 0
        """Levels of which the head has been told what is legal."""

    @property
    def masks(self) -> NDArray[np.uint32]:
        """[1 + n, W]: what may follow the root and each node."""
        masks = np.full((1 + len(self._tokens), self.constraint.words), ALL, dtype=np.uint32)
        masks[: len(self._fit.masks)] = self._fit.masks
        return masks

    def read(self, tokens: NDArray[np.int32], _: NDArray[np.int32]) -> Walk:
        """Walk along the draft, [n]; after the head drafted again, along the new one."""
        self._tokens = tokens.tolist()
        self.to_mask, self.gain = None, 0.0
        always = self._drawn and not self._masked
        yield from self._fit.settle([] if self._blank or always else self._tokens)
        if self._blank:
            return
        settled = len(self._fit.tokens)
        if not self._drawn:
            kept = np.full(len(tokens), -1, dtype=np.int32)
            kept[:settled] = self._fit.tokens
            self.mended = None if np.array_equal(kept, tokens) else kept
        is_open = settled < len(tokens) and not self._fit.ended
        # Where the head has been told and drafts nothing legal, there is nothing that it could.
        if is_open and settled >= self._masked and (always or not self._drawn):
            self._masked = settled + 1
            self.to_mask = np.array(self._fit.masks)
            self.gain = 1.0 - settled / len(tokens)

    def end(self) -> Walk:
        """No draft changes any more: walk along what was not walked along, as it might have."""
        if self._drawn and not self._blank:
            yield from self._fit.settle(self._tokens)

    def close(self) -> None:
        """Lead the session's grammar back to what stands."""
        self._fit.close()
