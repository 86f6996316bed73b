"""Own draft chains of sessions in a grammar, level by level. Names as in
`outrider_verifier.model_runner.gpu_runner.grammar_drafts`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.grammar.constraint import ALL_TOKENS, Mask, is_allowed, masks_along_drafts, single_id
from outrider.spec.sampling import Rule
from outrider_verifier.model_runner.batch import advance_grammar
from outrider_verifier.state.session import Session


class GrammarChain:
    """A chain that grows by what may follow.

    Where the grammar leaves one id, that is the draft, whatever the head thinks. The rejection rule
    takes a draft for a draw from its law: there nothing is given.
    """

    def __init__(self, session: Session) -> None:
        self.constraint = advance_grammar(session)
        """Where the chain ends."""
        self.tokens: list[int] = []
        """What is to be verified."""
        self.masks: list[Mask] = []
        """What may follow the root and each token, as far as that is known."""
        self.given: int | None = None
        """The next token, if it is known before it is drafted."""
        self.is_open = True
        """Whether anything may be drafted behind it."""
        self.is_known = True
        """Whether the device has the same chain."""
        self._drawn = session.spec.sampling.effective_rule is Rule.REJECTION
        self._entered = 0

    def set_mask(self, mask: Mask) -> None:
        """What may follow where the chain ends."""
        self.masks.append(mask)
        self.given = None if self._drawn else single_id(mask)

    def extend_chain(self, drafted: int | None, drafts: GrammarDraftBuffer) -> None:
        """Go on by what is given, or by what the head drafted; None: nobody has waited for that.
        The chain ends at what may not follow: the head has none of what may in its vocabulary."""
        token = drafted if self.given is None else self.given
        assert token is not None
        inside = 0 <= token < self.constraint.vocab_size
        if not inside or not is_allowed(self.masks[-1], token):
            # A draw stays what it is, and is rejected.
            self.is_open, self.is_known = False, self._drawn
            return
        self.tokens.append(token)
        self.is_known = self.given is None or drafts.has_token(token)
        entered = self.constraint.push_tokens([token])
        self._entered += entered
        self.is_open = entered > 0

    def padded_masks(self, length: int) -> NDArray[np.uint32]:
        """[1 + length, W]: what may follow the root and each node; anything where that is not
        known, for nothing can stand there."""
        masks = np.full((1 + length, self.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
        masks[: len(self.masks)] = self.masks
        return masks

    def padded_tokens(self, length: int) -> NDArray[np.int32]:
        """[length], -1 from where there is nothing."""
        tokens = np.full(length, -1, dtype=np.int32)
        tokens[: len(self.tokens)] = self.tokens
        return tokens

    def close(self) -> None:
        """Lead the session's grammar back to what stands."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0


def grow_chains(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> None:
    """Let chains, by slot, whose first tokens are being drafted, grow to their ends, and the device
    have them as they are. Waits for what the host cannot know."""
    open_ = dict(chains)
    for level in range(drafts.length):
        waits = any([chain.given is None for chain in open_.values()])
        drafted = drafts.read_chains() if waits else {}
        for slot, chain in open_.items():
            chain.extend_chain(drafted.get(slot), drafts)
        open_ = {slot: chain for slot, chain in open_.items() if chain.is_open}
        if not open_:
            break
        request_masks(open_.values())
        if level + 1 < drafts.length:
            if unknown := _unknown(open_):
                drafts.replace_tokens(list(unknown), _tokens(unknown, drafts), level)
            for chain in open_.values():
                chain.is_known = True
            masks = [chain.masks[-1][None] for chain in open_.values()]
            drafts.choose_level(list(open_), level + 1, masks)
    if unknown := _unknown(chains):
        drafts.write_chains(list(unknown), _tokens(unknown, drafts))


def _unknown(chains: Mapping[int, GrammarChain]) -> dict[int, GrammarChain]:
    """Those that the device has not as they are."""
    return {slot: chain for slot, chain in chains.items() if not chain.is_known}


def _tokens(chains: Mapping[int, GrammarChain], drafts: GrammarDraftBuffer) -> NDArray[np.int32]:
    return np.stack([chain.padded_tokens(drafts.length) for chain in chains.values()])


def request_masks(chains: Collection[GrammarChain]) -> None:
    """Have the masks of where these end."""
    found = masks_along_drafts([(chain.constraint, ()) for chain in chains])
    for chain, along in zip(chains, found, strict=True):
        chain.set_mask(along.masks[0])
