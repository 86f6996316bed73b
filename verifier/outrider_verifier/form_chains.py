"""An own draft chain of a session in a grammar. Names as in `outrider_verifier.form_drafts`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL, allows, only_id
from outrider.spec.sampling import Rule
from outrider_verifier.packing import follow_output
from outrider_verifier.sessions import Session


class ChainWalk:
    """What of a chain fits stands; where the grammar leaves one id, that is the draft; what is open
    behind that is drafted again, or cut off.

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
        self._constraint, self._blank = follow_output(session), blank
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._first = self._constraint.legal()
        self._settled = 0
        """Levels whose tokens are settled."""
        self._entered = 0
        """Of these, tokens that the constraint has entered."""
        self._masked = 0
        """Levels of which the head has been told what is legal."""

    def read(self, tokens: NDArray[np.int32], _: NDArray[np.int32]) -> None:
        """The draft, [n]; after the head drafted again, the new one."""
        if not self._masked:
            self.masks = np.full((1 + len(tokens), len(self._first)), ALL, dtype=np.uint32)
            """[1 + n, W]: what may follow the root and each node."""
            self.masks[0] = self._first
            self._tokens = np.full(len(tokens), -1, dtype=np.int32)
        self.to_mask, self.gain = None, 0.0
        if self._blank:
            return
        if self._drawn and not self._masked:
            self._ask_again(1, 1.0)
            return
        open_level = self._settle(tokens.tolist())
        if not self._drawn:
            changed = bool((self._tokens != tokens).any())
            self.mended = self._tokens if changed else None
            if open_level is not None and open_level >= self._masked:
                self._ask_again(open_level + 1, 1.0 - open_level / len(tokens))

    def close(self) -> None:
        """Leave what was entered."""
        self._constraint.leave(self._entered)
        self._entered = 0

    def _ask_again(self, levels: int, gain: float) -> None:
        self._masked, self.to_mask, self.gain = levels, self.masks[:levels], gain

    def _settle(self, drafted: list[int]) -> int | None:
        """Go on along the chain; the level at which something else would have to be drafted."""
        stale = False
        while self._settled < len(drafted):
            level = self._settled
            token = drafted[level]
            if stale or token < 0 or not allows(self.masks[level], token):
                forced = None if self._drawn else only_id(self.masks[level])
                if forced is None:
                    return level
                # The head drafted what follows behind another token.
                token, stale = forced, True
            self._tokens[level] = token
            self._settled += 1
            if not self._constraint.enter(token):
                self._settled = len(drafted)
                return None
            self._entered += 1
            self.masks[level + 1] = self._constraint.legal()
        return None
