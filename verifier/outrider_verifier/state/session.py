"""Session: tokens, KV, plan and phase of one served request. Engine thread only.

`SessionHandles` assigns small integers to sessions. These handles index the per-session arrays of
this process and identify a session to its drafter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kv_cache import KVSequence
from outrider.errors import InternalError, InvalidRequestError
from outrider.grammar.constraint import Constraint
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.wire.messages import SessionSpec
from outrider_verifier.state.session_phase import (
    ALLOWED_TRANSITIONS,
    DECODING,
    ENDED,
    PREFILLING,
    SWAPPED,
    WAITING,
    SessionPhase,
)
from outrider_verifier.state.session_records import (
    DrafterRecord,
    PreemptionRecord,
    PrefillProgress,
)

if TYPE_CHECKING:
    from outrider_verifier.planner.workload import SpeculationState


from heapq import heappop, heappush

NO_LIMIT: Final = 1 << 20
"""Value of `draft_limit` that does not limit any draft."""


@dataclass(slots=True, kw_only=True)
class Session:
    """State of a request on this verifier.

    `tokens[:length]` is the committed prefix. While the session prefills, the KV of fewer than
    `prefill.target` of these tokens is written. Later the KV of `length` - 1 tokens is written: the
    last token is the root. A waiting session has no KV, but keeps all other state, so that no
    committed token and no feature is sent twice.
    """

    spec: SessionSpec
    plan: SpeculationPlan
    ticket: int
    """Number of the request to open the session. It distinguishes sessions that have had the same
    session id."""
    kv: KVSequence
    tokens: NDArray[np.int32]
    """Token ids of prompt and output, int32 [prompt length + max_new_tokens]. Entries from `length`
    on are not set."""
    length: int
    root_known_at: float
    """Time at which the current root became known. While the session prefills, it is the time at
    which the session was opened."""
    stop_ids: frozenset[int]
    keeps_features: bool
    """Whether features are kept for a drafter. It is set when the session is opened and cannot
    become True later, because features cannot be computed afterwards."""
    opened_at: float
    prefill: PrefillProgress
    preemption: PreemptionRecord
    max_blocks: int
    """Maximum number of KV blocks that the session may ever hold; 0 if its blocks are not
    managed."""
    in_process_draft_length: int
    """Maximum draft length of the in-process drafter for this session; 0 if it does not draft for
    this session."""
    constraint: Constraint | None
    """Constraint on the next tokens from the session's grammar and token limits; None if all tokens
    are allowed. It is advanced over committed tokens only, so it stays valid through
    preemptions."""
    phase: SessionPhase = WAITING
    """Phase of the session. Change it only with `change_phase`."""
    written_positions: int = 0
    """Number of positions whose KV was ever written, even if that KV was lost since. Drafters have
    received the features of these positions."""
    cached_tokens: int | None = None
    """Number of prompt tokens whose KV was in the prefix cache when the session was first admitted;
    None before that. Later admissions do not change it."""
    handle: int = -1
    """Index of the session in the per-session arrays of this process, and its name in messages to
    drafters; -1 if the session has no handle."""
    round_id: int = 0
    emitted: int = 0
    """Number of tokens that the session has emitted on this verifier."""
    link_id: int | None = None
    """Exchange link of the drafter that drafts for the session; None if no drafter was told about
    the session."""
    has_stalled_drafter: bool = False
    """Whether a proposal timeout has passed because of the session's drafter. The session's rounds
    then do not wait for proposals until one arrives or a number of rounds has passed."""
    drafter_record: DrafterRecord = field(default_factory=DrafterRecord)
    proposal_at: float = 0.0
    """Time at which the newest usable proposal arrived."""
    speculation_state: SpeculationState | None = None
    """State of the speculation policy for this session; None if the session's plan does not
    speculate."""
    is_speculation_off: bool = False
    """Whether the speculation policy has turned speculation off for this session. The session then
    decodes plainly, and its drafter receives nothing."""
    has_dropped_features: bool = False
    """Whether the session's features are no longer kept, because the speculation policy decided so
    or because features are exchanged between devices. A drafter that needs features can then never
    again draft for the session by messages."""
    is_look_ahead_on: bool = False
    """Whether the speculation policy has turned look-ahead on for this session. The drafter is
    informed of changes."""
    draft_limit: int = NO_LIMIT
    """Maximum number of draft levels that a round should verify, according to the speculation
    policy."""
    covered_len: int = 0
    """Session length, in tokens, up to which the session needs no further KV blocks."""

    @classmethod
    def create(
        cls,
        spec: SessionSpec,
        *,
        ticket: int,
        kv: KVSequence,
        now: float,
        keeps_features: bool,
        max_blocks: int = 0,
        in_process_draft_length: int = 0,
        constraint: Constraint | None = None,
    ) -> Session:
        """Return a new session that waits to be prefilled. `max_blocks` is 0 if the session's
        blocks are not managed. The other arguments are described at the attributes of the same
        names."""
        prompt = np.asarray(spec.token_ids, dtype=np.int32)
        tokens = np.empty(len(prompt) + spec.max_new_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        return cls(
            spec=spec,
            plan=spec.plan,
            ticket=ticket,
            kv=kv,
            tokens=tokens,
            length=len(prompt),
            root_known_at=now,
            stop_ids=frozenset(spec.stop_token_ids),
            keeps_features=keeps_features,
            opened_at=now,
            prefill=PrefillProgress(target=len(prompt)),
            preemption=PreemptionRecord(waiting_since=now),
            max_blocks=max_blocks,
            in_process_draft_length=in_process_draft_length,
            constraint=constraint,
        )

    @property
    def session_id(self) -> SessionId:
        """Id of the session."""
        return self.spec.session_id

    @property
    def drafter_plan(self) -> SpeculationPlan:
        """Speculation plan to send to the session's drafter: the session's plan, with look-ahead as
        the speculation policy decided."""
        if self.is_look_ahead_on == (self.plan.look_ahead > 0):
            return self.plan
        return replace(self.plan, look_ahead=int(self.is_look_ahead_on))

    @property
    def max_len(self) -> int:
        """Maximum length of the prefix in tokens."""
        return len(self.tokens)

    @property
    def prefill_left(self) -> int:
        """Number of tokens to prefill that were not yet submitted in a round; 0 if the session can
        decode."""
        return 0 if self.phase is DECODING else self.prefill.left

    @property
    def is_prefilled(self) -> bool:
        """Whether the KV of the whole prompt was ever written, as far as the host knows."""
        return self.written_positions >= len(self.spec.token_ids)

    @property
    def kv_len(self) -> int:
        """Number of positions whose KV must be written before the session can decode. These are all
        positions, except that of the root if any token was emitted."""
        return self.length - 1 if self.emitted else self.length

    @property
    def is_waiting(self) -> bool:
        """Whether the session has no KV and waits for KV blocks. Such a session is in no round."""
        return self.phase is WAITING or self.phase is SWAPPED

    @property
    def root(self) -> int:
        """The newest committed token."""
        return int(self.tokens[self.length - 1])

    @property
    def remaining(self) -> int:
        """Number of tokens that the session may still emit."""
        return self.spec.max_new_tokens - self.emitted

    @property
    def stops_from(self) -> int:
        """First position at which a stop token may be emitted."""
        return self.spec.prompt_len + self.spec.min_new_tokens

    @property
    def max_draft_depth(self) -> int:
        """Maximum depth of a draft in the next round; 0 if the round needs no draft.

        It is less than `remaining`, because a round emits one token in addition to the accepted
        draft tokens.
        """
        return min(self.remaining - 1, self.draft_limit)

    @property
    def draft_wanted(self) -> bool:
        """Whether the session uses proposals that are sent as messages, and may still emit enough
        tokens to use one."""
        return self.wants_outside_drafts and self.max_draft_depth > 0

    @property
    def wants_outside_drafts(self) -> bool:
        """Whether the session uses proposals that a drafter in another process sends as messages:
        it speculates, has no in-process drafts, and has a drafter."""
        return (
            not (self.is_speculation_off or self.in_process_draft_length or self.lacks_drafter)
            and self.plan.is_speculative
        )

    @property
    def lacks_drafter(self) -> bool:
        """Whether the session's plan speculates and it has no drafter, although its speculation is
        not off and it has no in-process drafts."""
        return self.plan.is_speculative and not (
            self.link_id is not None
            or self.has_stalled_drafter
            or self.is_speculation_off
            or self.in_process_draft_length
        )

    @property
    def in_process_depth(self) -> int:
        """Maximum depth of the session's in-process draft in the next round.

        It is not limited by the token budget, because a round may be submitted before the remaining
        budget is known. Tokens beyond the budget are cut from the output.
        """
        own, wanted = self.in_process_draft_length, self.plan.draft_tokens
        if not own or self.is_speculation_off:
            return 0
        return own if own < wanted else wanted

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter in another process was told about the session and receives its
        verdicts."""
        return self.link_id is not None and not self.is_speculation_off

    @property
    def looks_ahead(self) -> bool:
        """Whether the session's drafter should use look-ahead, that is, draft before the
        verdict."""
        return self.is_look_ahead_on and self.has_drafter

    @property
    def awaits_proposal(self) -> bool:
        """Whether the next round should wait for a proposal until the proposal timeout."""
        return self.link_id is not None and not self.has_stalled_drafter and self.draft_wanted

    def waited_s(self, now: float) -> float:
        """Return the total time that the session has waited for KV blocks until now, in seconds."""
        before = self.preemption.total_wait_s
        return before + (now - self.preemption.waiting_since if self.is_waiting else 0.0)

    # ---- its tokens, plan and drafter ----------------------------------------------------------

    def commit_tokens(self, tokens: Sequence[int], now: float, rounds: int = 0) -> None:
        """Append emitted tokens to the prefix; the last one becomes the root. `now` is the time at
        which they became known. `rounds` is the number of decode rounds that produced them; 0 for
        the first token after the prompt."""
        count = len(tokens)
        end = self.length + count
        if count == 1:  # as in every plain round; a slice takes four times as long
            self.tokens[end - 1] = tokens[0]
        else:
            self.tokens[self.length : end] = tokens
        self.length = end
        self.written_positions = end - 1
        self.emitted += count
        self.round_id += rounds
        self.root_known_at = now

    def change_plan(self, plan: SpeculationPlan, in_process_draft_length: int) -> None:
        """Replace the speculation plan and the in-process draft length, from the next round on."""
        self.plan = plan
        self.set_in_process_drafts(in_process_draft_length)

    def set_in_process_drafts(self, length: int) -> None:
        """Set the maximum length of in-process drafts from the next round on; 0 turns them off."""
        self.in_process_draft_length = length
        self.recheck_blocks()

    def assign_drafter(self, drafter_id: DrafterId | None) -> None:
        """Assign the session to another drafter; None assigns it to no drafter."""
        self.spec = replace(self.spec, drafter_id=drafter_id)
        self.drafter_record.reset_losses()

    def mark_announced(self, link_id: int) -> None:
        """Record that the session's drafter was told about the session on this link."""
        self.link_id = link_id

    def mark_withdrawn(self) -> None:
        """Record that no drafter drafts for the session any more."""
        self.link_id = None

    # ---- its KV blocks ------------------------------------------------------------------------

    def record_blocks(self, headroom: int) -> None:
        """Record the session length up to which the KV blocks suffice. `headroom` is the number of
        KV slots that a round may write beyond the committed tokens."""
        self.covered_len = self.kv.capacity - headroom + 1

    def recheck_blocks(self) -> None:
        """Request a check of the session's KV blocks before the next round, because that round may
        write to more positions than before."""
        self.covered_len = 0

    # ---- its phase -----------------------------------------------------------------------------

    def change_phase(self, phase: SessionPhase) -> None:
        """Change the phase. Raises InternalError if the present phase may not be followed by
        `phase`."""
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            raise InternalError(
                f"session {self.session_id} is {self.phase.value} and cannot become {phase.value}",
                reason="INVALID_PHASE",
            )
        self.phase = phase

    def mark_preempted(self, now: float, *, swapped: bool) -> None:
        """Record that the session was preempted: it has lost its KV and waits for KV blocks.
        `swapped` is whether the KV was copied to host memory."""
        self.change_phase(SWAPPED if swapped else WAITING)
        self.preemption.waiting_since = now
        self.preemption.count += 1

    def mark_recomputing(self, now: float) -> None:
        """Record that the session has released its KV in order to prefill its prefix again. This
        does not count as a preemption."""
        self.change_phase(WAITING)
        self.preemption.waiting_since = now

    def mark_admitted(self, now: float, *, kept: bool, found: int = 0) -> None:
        """Record that the session has received KV blocks and can run. `kept` is whether its KV is
        still intact. If not, its KV is computed again, except for the first `found` tokens, whose
        KV is in the prefix cache. The root does not change."""
        assert self.is_waiting, (self.session_id, self.phase)
        if self.cached_tokens is None:
            # After a failover, a part of the earlier output may have been found, too.
            self.cached_tokens = min(found, self.spec.prompt_len)
        if not kept:
            self.prefill = PrefillProgress(target=self.kv_len, sent=found)
            self.written_positions = max(self.written_positions, found)
        self.change_phase(PREFILLING if self.prefill.left else DECODING)
        self.preemption.end_wait(now)
        if not (self.preemption.count or self.emitted):
            return
        self.preemption.record_resume(now, self.length)
        if self.speculation_state is not None:
            self.speculation_state.record_resume()
        # The session did not wait for a draft in this time. Prompts are ordered by the time of
        # their opening.
        self.root_known_at = self.opened_at if self.prefill.left else now

    def mark_submitted(self, end: int) -> None:
        """Record that a round was submitted that prefills the session's tokens up to position `end`
        (exclusive)."""
        assert self.phase is PREFILLING, (self.session_id, self.phase)
        self.prefill.sent = end
        if not self.prefill.left:
            self.change_phase(DECODING)

    def mark_prefilled(self, end: int, now: float) -> int:
        """Record that the KV of the positions before `end` is written. Return how many of these
        positions were written for the first time."""
        fresh = max(0, end - self.written_positions)
        self.written_positions += fresh
        if self.emitted and end == self.prefill.target:
            self.root_known_at = now
        return fresh

    def mark_ended(self) -> None:
        """Record that the session has ended. Its resources are released, and no later round
        contains it."""
        self.change_phase(ENDED)


def any_keeps_features(sessions: Sequence[Session]) -> bool:
    """Return whether any of these sessions keeps features. A round with such a session must compute
    features."""
    return any([session.keeps_features for session in sessions])


def check_spec(
    spec: SessionSpec, *, vocab_size: int, max_context_len: int, max_tree_nodes: int
) -> None:
    """Raise InvalidRequestError if a session with this specification can never be served."""
    count = len(spec.token_ids)
    # Messages are formatted only for refused sessions, because formatting took most of the time.
    if not count:
        _refuse("the prompt is empty", "EMPTY_PROMPT")
    stops = spec.stop_token_ids
    _check_ids(spec.token_ids, vocab_size, "prompt token ids")
    _check_ids(stops, vocab_size, "stop token ids")
    if not 1 <= spec.prompt_len <= count:
        _refuse(f"prompt_len must be in [1, {count}], got {spec.prompt_len}", "INVALID_PROMPT_LEN")
    if spec.max_new_tokens < 1:
        _refuse(
            f"max_new_tokens must be at least 1, got {spec.max_new_tokens}",
            "INVALID_MAX_NEW_TOKENS",
        )
    if count + spec.max_new_tokens > max_context_len:
        _refuse(
            f"prompt ({count}) and max_new_tokens ({spec.max_new_tokens}) exceed the context of "
            f"{max_context_len} tokens",
            "CONTEXT_TOO_LONG",
        )
    if (limits := spec.token_limits) is not None:
        every = [*itertools.chain(limits.allowed_ids, *limits.bad_words)]
        _check_ids(every, vocab_size, "allowed ids and those of bad words")
    if (budget := spec.thinking_budget) is not None:
        _check_ids((*budget.open_ids, *budget.close_ids), vocab_size, "ids of the thinking budget")
    if spec.structured_output is not None and not stops:
        _refuse(
            "structured output needs a stop token id: nothing else could end it",
            "INVALID_STRUCTURE",
        )
    check_plan(spec.plan, max_tree_nodes=max_tree_nodes)


def check_plan(plan: SpeculationPlan, *, max_tree_nodes: int) -> None:
    """Raise InvalidRequestError if proposals of this plan may have more nodes than the verifier
    allows."""
    if plan.is_speculative and plan.draft_tokens > max_tree_nodes:
        _refuse(
            f"draft_tokens must be at most {max_tree_nodes} on this verifier, got "
            f"{plan.draft_tokens}",
            "INVALID_PLAN",
        )


def _check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        _refuse(f"{what} must be in [0, {vocab_size})", "TOKEN_OUT_OF_RANGE")


def _refuse(message: str, reason: str) -> NoReturn:
    raise InvalidRequestError(message, reason=reason)


class SessionHandles:
    """Assigns handles to sessions. Handles are integers from 0 to `count` - 1. The lowest free
    handle is assigned first, so that the used parts of per-session arrays stay short.

    Engine thread only.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._owners: list[Session | None] = [None] * count
        self._free = list(range(count))
        """Heap of the free handles."""

    def assign(self, session: Session) -> None:
        """Assign a handle to a session that has none. There must be a free handle."""
        session.handle = heappop(self._free)
        self._owners[session.handle] = session

    def release(self, session: Session) -> None:
        """Release the session's handle."""
        self._owners[session.handle] = None
        heappush(self._free, session.handle)
        session.handle = -1

    def get_owner(self, handle: int) -> Session:
        """Return the session that has this handle. There must be one."""
        session = self._owners[handle]
        assert session is not None, handle
        return session

    def clear(self) -> None:
        """Release the handles of all sessions."""
        for session in self._owners:
            if session is not None:
                session.handle = -1
        self._owners = [None] * self.count
        self._free = list(range(self.count))
