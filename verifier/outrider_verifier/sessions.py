"""The state of one session on a verifier; owned by the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kvcache import KVSequence
from outrider.errors import InvalidRequestError
from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import Plan
from outrider.wire.messages import SessionSpec, SpecStats
from outrider_verifier.rows import max_draft_depth

if TYPE_CHECKING:
    from outrider_verifier.policy import Pace

NO_LIMIT: Final = 1 << 20
"""A draft limit that no draft reaches."""


@dataclass(slots=True, kw_only=True)
class Session:
    """A request being served.

    `tokens[:length]` is the committed prefix. While prefilling, K/V is written for fewer than
    `prompt_tokens` of them; afterwards for length - 1: the last token is the root.
    """

    spec: SessionSpec
    plan: Plan
    ticket: int
    """Number of the `open` call; tells two incarnations of one session id apart."""
    kv: KVSequence
    tokens: NDArray[np.int32]
    """[prompt + max_new_tokens], filled up to `length`."""
    length: int
    since: float
    """When the current root became known (while prefilling: when the session was opened)."""
    stop_ids: frozenset[int]
    keeps_features: bool
    """Whether features are kept; fixed at the opening, because they cannot be had later."""
    digest: int = 0
    """Prefix digest of `tokens[:length]`; kept only for a session that names a drafter."""
    round_id: int = 0
    emitted: int = 0
    """Tokens emitted by this incarnation."""
    stats: SpecStats = field(default_factory=SpecStats)
    link_id: int | None = None
    """The exchange link on which the session is announced; None: it decodes plainly."""
    suspect: bool = False
    """Its drafter let a patience run out; no waiting until a proposal shows that it is back."""
    proposal_at: float = 0.0
    """When the newest usable proposal arrived."""
    own_draft: int = 0
    """Draft length of the head in this process, which drafts for the session; 0: it does not."""
    pace: Pace | None = None
    """What the policy keeps of it; None: its plan does not speculate."""
    paused: bool = False
    """Whether the policy has it decode plainly; its drafter is told nothing meanwhile."""
    draft_limit: int = NO_LIMIT
    """Draft levels that the policy finds worth verifying."""
    ended: bool = False
    """Whether everything it held was given back; a round in flight may still name it."""

    @classmethod
    def create(
        cls, spec: SessionSpec, *, ticket: int, kv: KVSequence, now: float, keeps_features: bool
    ) -> Session:
        """State of a session that is about to be prefilled."""
        prompt = np.asarray(spec.token_ids, dtype=np.int32)
        tokens = np.empty(len(prompt) + spec.max_new_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        named = spec.drafter_id is not None
        return cls(
            spec=spec,
            plan=spec.plan,
            ticket=ticket,
            kv=kv,
            tokens=tokens,
            length=len(prompt),
            since=now,
            stop_ids=frozenset(spec.stop_token_ids),
            keeps_features=keeps_features,
            digest=extend_digest(EMPTY_DIGEST, spec.token_ids) if named else 0,
        )

    @property
    def session_id(self) -> SessionId:
        """The session's id."""
        return self.spec.session_id

    @property
    def max_len(self) -> int:
        """Upper bound of the prefix in tokens."""
        return len(self.tokens)

    @property
    def prefill_left(self) -> int:
        """Prompt tokens whose K/V is unwritten; 0 once the session decodes."""
        return max(0, len(self.spec.token_ids) - self.kv.len)

    @property
    def root(self) -> int:
        """The newest committed token."""
        return int(self.tokens[self.length - 1])

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.spec.max_new_tokens - self.emitted

    @property
    def total_emitted(self) -> int:
        """Tokens emitted since the prompt, former incarnations included."""
        return self.length - self.spec.prompt_len

    @property
    def banned_now(self) -> tuple[int, ...]:
        """Ids that the next round must not emit (stop tokens, below the minimum length)."""
        # Nearly no session asks for a minimum.
        if self.spec.min_new_tokens and self.total_emitted < self.spec.min_new_tokens:
            return self.spec.stop_token_ids
        return ()

    @property
    def max_draft_depth(self) -> int:
        """How deep a draft may reach in the next round; 0: none is wanted."""
        deepest = max_draft_depth(
            remaining=self.remaining,
            emitted=self.total_emitted,
            min_new=self.spec.min_new_tokens,
        )
        return min(deepest, self.draft_limit)

    @property
    def draft_wanted(self) -> bool:
        """Whether a drafter's proposal for the current prefix could help."""
        drafted_for = self.plan.speculative and not self.own_draft and not self.paused
        return drafted_for and self.max_draft_depth > 0

    @property
    def own_depth(self) -> int:
        """How deep the draft of this process's own head may stand in the next round.

        The token budget does not bound it: what exceeds that is cut off the emission, and a round
        may be submitted before the budget left is known.
        """
        if self.paused:
            return 0
        depth = min(self.own_draft, self.plan.draft_tokens, self.draft_limit)
        missing = self.spec.min_new_tokens - self.total_emitted
        return min(depth, missing - 1) if missing > 0 else depth

    @property
    def awaits_proposal(self) -> bool:
        """Whether the next round should wait for a proposal, within the patience."""
        return self.link_id is not None and not self.suspect and self.draft_wanted

    def append(self, tokens: Sequence[int], now: float) -> None:
        """Commit emitted tokens; the last one becomes the root."""
        end = self.length + len(tokens)
        self.tokens[self.length : end] = tokens
        self.length = end
        self.emitted += len(tokens)
        self.since = now
        if self.spec.drafter_id is not None:
            self.digest = extend_digest(self.digest, tokens)


def check_spec(
    spec: SessionSpec, *, vocab_size: int, max_context_len: int, max_tree_nodes: int
) -> None:
    """Refuse a session that can never be served. Raises InvalidRequestError."""
    count = len(spec.token_ids)
    _require(count > 0, "the prompt is empty", "EMPTY_PROMPT")
    _require(
        min(spec.token_ids) >= 0 and max(spec.token_ids) < vocab_size,
        f"prompt token ids must be in [0, {vocab_size})",
        "TOKEN_OUT_OF_RANGE",
    )
    _require(
        all(0 <= token < vocab_size for token in spec.stop_token_ids),
        f"stop token ids must be in [0, {vocab_size})",
        "TOKEN_OUT_OF_RANGE",
    )
    _require(
        1 <= spec.prompt_len <= count,
        f"prompt_len must be in [1, {count}], got {spec.prompt_len}",
        "INVALID_PROMPT_LEN",
    )
    _require(
        spec.max_new_tokens >= 1,
        f"max_new_tokens must be at least 1, got {spec.max_new_tokens}",
        "INVALID_MAX_NEW_TOKENS",
    )
    _require(
        count + spec.max_new_tokens <= max_context_len,
        f"prompt ({count}) and max_new_tokens ({spec.max_new_tokens}) exceed the context of "
        f"{max_context_len} tokens",
        "CONTEXT_TOO_LONG",
    )
    check_plan(spec.plan, max_tree_nodes=max_tree_nodes)


def check_plan(plan: Plan, *, max_tree_nodes: int) -> None:
    """Refuse a plan whose proposals would all be invalid here. Raises InvalidRequestError."""
    _require(
        not plan.speculative or plan.draft_tokens <= max_tree_nodes,
        f"draft_tokens must be at most {max_tree_nodes} on this verifier, got {plan.draft_tokens}",
        "INVALID_PLAN",
    )


def _require(ok: bool, message: str, reason: str) -> None:
    if not ok:
        raise InvalidRequestError(message, reason=reason)
