"""NgramProposer: drafts by n-gram lookup in a session's own tokens (prompt lookup)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import allowed_prefix_len
from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree, path
from outrider.wire.messages import FeatureLayout, WireTensor
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    ProposedDraft,
    SessionDrafts,
    empty_scores,
)
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_grammars import constraint_of

_LOGPROB: Final = math.log(0.5)
"""Log-prob of every looked-up token; the real probability is learned from verdicts."""


def find_continuation(
    tokens: NDArray[np.int32], count: int, *, max_match: int, min_match: int
) -> NDArray[np.int32]:
    """Return up to `count` tokens that followed an earlier occurrence of the end of `tokens`.

    The longest suffix of `tokens` (max_match to min_match tokens long) that occurred before is
    used, at its most recent occurrence. If the copy reaches the end of `tokens`, it continues with
    the tokens that it has just copied, so that repeating text continues to repeat. Returns an empty
    array if nothing matches.
    """
    last = len(tokens) - 1
    if last < 1 or count <= 0:
        return tokens[:0]
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    matched = 1
    while matched < max_match and len(ends):
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if not len(ends) or matched < min_match:
        return tokens[:0]
    end = int(ends[-1])
    period = last - end
    return tokens[end + 1 + np.arange(count) % period]


class NgramProposer:
    """Prompt-lookup proposer. It keeps no state except the proposals that were scored last."""

    method = DraftMethod.NGRAM
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    is_usable = True

    def __init__(self, *, max_match: int = 4, min_match: int = 2) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"1 <= min_match <= max_match, not {min_match} and {max_match}")
        self._max_match = max_match
        self._min_match = min_match
        self._lives: Sequence[PendingProposal] = ()
        """The proposals that were scored last."""

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Return the data unchanged. Not called, because this proposer needs no features."""
        return wire.data

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Do nothing, because there is no state to update."""

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Draft a chain for each session whose last tokens occurred before."""
        drafted: list[tuple[FollowedSession, ProposedDraft]] = []
        for session in sessions:
            count = min(session.plan.draft_tokens, session.draft_levels_left)
            found = _allowed(session, self._continued(session.tokens.view, count))
            if len(found):
                drafted.append((session, ProposedDraft(tree=DraftTree.chain(found))))
        yield SessionDrafts.of_drafts(drafted)

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Predict the token that the target emits after each place (root or node) of these
        proposals. The lookup finds where the session's last tokens occurred before, and the tokens
        that followed there. If a proposal consists of these tokens, each of its places gets one
        candidate: the following token that comes next. Other proposals get no candidates."""
        self._lives, scored = lives, empty_scores(lives)
        for live, tokens, logprobs in zip(lives, scored.tokens, scored.logprobs, strict=True):
            found = self._continued(live.session.tokens.view, len(live.tree) + 1)
            if np.array_equal(found[:-1], live.tree.tokens):
                tokens[:, 0], logprobs[:, 0] = found, _LOGPROB
        return scored

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Draft a chain for each outcome whose last tokens occurred before."""
        made: list[int] = []
        drafted: list[tuple[FollowedSession, ProposedDraft]] = []
        for index, outcome in enumerate(outcomes):
            session, tree = self._lives[outcome.live]
            suffix = np.append(tree.tokens[list(path(tree.parents, outcome.node))], outcome.token)
            count = min(session.plan.draft_tokens, session.draft_levels_left - len(suffix))
            tokens = np.concatenate((session.tokens.view, suffix.astype(np.int32)))
            found = _allowed(session, self._continued(tokens, count), suffix.tolist())
            if len(found):
                made.append(index)
                drafted.append((session, ProposedDraft(tree=DraftTree.chain(found))))
        if made:
            yield OutcomeDrafts.of_drafts(
                np.array(made, dtype=np.int64), SessionDrafts.of_drafts(drafted)
            )

    def _continued(self, tokens: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        return find_continuation(
            tokens, count, max_match=self._max_match, min_match=self._min_match
        )

    def release_session(self, session: FollowedSession) -> None:
        """Do nothing, because sessions have no state here."""


def _allowed(
    session: FollowedSession, found: NDArray[np.int32], suffix: Sequence[int] = ()
) -> NDArray[np.int32]:
    """Return the longest prefix of `found` that the session's constraint allows after its tokens
    and `suffix`."""
    constraint = constraint_of(session)
    if constraint is None or not len(found):
        return found
    allowed_tokens = allowed_prefix_len(constraint, [*suffix, *found.tolist()])
    return found[: max(0, allowed_tokens - len(suffix))]
