"""Hypothesis strategies for the messages of the exchange and the control plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.draft_distribution import DraftDistribution, make_distribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import MAX_THINKING_TOKENS, ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tree import DraftTree, children
from outrider.wire import messages
from outrider.wire.pool_codec import RemovedDrafter

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
LENGTHS = st.integers(0, 2**24)
IDS = st.integers(0, 2**24 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
MAYBE_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SESSION_IDS = NAMES.map(SessionId)
TRACEPARENTS = st.just("") | st.from_regex(r"\A00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]\Z")
METHODS = st.lists(st.sampled_from(DraftMethod), max_size=5).map(tuple)
HANDLES = st.integers(0, 2**20 - 1)
TIMES = st.floats(0, 1e9)


def id_lists(max_size: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(IDS, max_size=max_size).map(tuple)


BIASES = st.dictionaries(IDS, st.floats(-100, 100), max_size=20).map(lambda d: tuple(d.items()))
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=UINT32,
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(1e-6, 1e6),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    banned_ids=id_lists(),
    logit_bias=BIASES,
    seed=UINT64,
    rule=st.sampled_from(Rule),
)
STRUCTURED = st.none() | st.one_of(
    st.just(StructuredOutput(StructuredKind.JSON_OBJECT)),
    st.builds(
        StructuredOutput,
        st.sampled_from([kind for kind in StructuredKind if kind != "json_object"]),
        NAMES,
    ),
)
TOKEN_LIMITS = st.none() | st.builds(
    TokenLimits,
    allowed_ids=st.lists(IDS, min_size=1, max_size=8).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
)
THINKING_BUDGETS = st.none() | st.builds(
    ThinkingBudget,
    max_tokens=st.integers(0, MAX_THINKING_TOKENS),
    open_tag=st.just("<think>"),
    open_ids=st.lists(IDS, min_size=1, max_size=4).map(tuple),
    close_tag=NAMES,
    close_ids=st.lists(IDS, min_size=1, max_size=4).map(tuple),
)
PLANS = st.builds(
    SpeculationPlan,
    method=st.sampled_from(DraftMethod),
    draft_tokens=st.integers(0, 256),
    top_k=st.integers(1, 32),
    depth=st.integers(0, 256),
    look_ahead=st.integers(0, 1),
    fan_out=st.integers(0, 64),
    proposal_timeout_ms=st.integers(0, 60_000),
)
STATS = st.builds(
    messages.SpecStats,
    rounds=UINT64,
    emitted=UINT64,
    proposed=UINT64,
    accepted=UINT64,
    fallback_rounds=UINT64,
    target_only_rounds=UINT64,
    accepted_per_depth=st.lists(UINT64, max_size=8).map(tuple),
    paused_rounds=UINT64,
    decision=st.text("abc/é", max_size=32),
    look_ahead_rounds=UINT64,
    hit_rounds=UINT64,
    hit_accepted=UINT64,
    fresh_rounds=UINT64,
    fresh_accepted=UINT64,
    drafted_rounds=UINT64,
)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> DraftTree:
    """Trees that keep every distribution of spec.tree."""
    count = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    tokens = draw(st.lists(IDS, min_size=count, max_size=count, unique=True))
    logprobs: list[float] = []
    for parent in parents:
        above = 0.0 if parent < 0 else logprobs[parent]
        logprobs.append(float(np.float32(above - draw(st.floats(0, 20, width=32)))))
    return DraftTree(
        tokens=np.array(tokens, dtype=np.int32),
        parents=np.array(parents, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
    )


@st.composite
def laws(draw: st.DrawFn, tree: DraftTree) -> DraftDistribution:
    """A distribution that could have drawn the tree's tokens."""
    slots = {}
    for slot, nodes in enumerate(children(tree.parents)):
        if nodes:
            extra = draw(st.sets(IDS, max_size=4))
            ids = sorted(extra | {int(tree.tokens[node]) for node in nodes})
            counts = draw(st.lists(st.integers(1, 2**16 - 1), min_size=len(ids), max_size=len(ids)))
            slots[slot] = (np.array(ids, dtype=np.int32), np.array(counts, dtype=np.uint16))
    return make_distribution(len(tree), slots)


@st.composite
def proposals(draw: st.DrawFn) -> messages.Proposals:
    drafts = []
    for handle in draw(st.lists(HANDLES, min_size=1, max_size=4, unique=True)):
        tree = draw(trees(max_nodes=8))
        drafts.append(
            messages.Proposal(
                handle=handle,
                prefix_digest=draw(UINT64),
                prefix_len=draw(st.integers(1, 2**24)),
                tree=tree,
                distribution=draw(laws(tree)) if draw(st.booleans()) else None,
            )
        )
    return messages.Proposals.of_proposals(drafts, draft_us=draw(UINT64))


@st.composite
def verdicts(draw: st.DrawFn) -> messages.Verdicts:
    dtype, holder = draw(
        st.sampled_from(
            [
                (messages.TensorDtype.FLOAT32, "<f4"),
                (messages.TensorDtype.FLOAT16, "<f2"),
                (messages.TensorDtype.BFLOAT16, "<u2"),
            ]
        )
    )
    width = draw(st.integers(1, 8))
    told = []
    for handle in draw(st.lists(HANDLES, min_size=1, max_size=4, unique=True)):
        rows = draw(st.integers(0, 4))
        size = rows * width * np.dtype(holder).itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        data = np.frombuffer(raw, holder).reshape(rows, width)
        told.append(
            messages.Verdict(
                handle=handle,
                start=draw(LENGTHS),
                tokens=np.array(draw(id_lists()), dtype=np.int32),
                prefix_digest=draw(UINT64),
                feature_start=draw(LENGTHS),
                features=messages.WireTensor(dtype=dtype, data=data) if rows else None,
                draft_wanted=draw(st.booleans()),
            )
        )
    whole = messages.Verdicts.of_verdicts(told)
    if whole.features is None or not draw(st.booleans()):
        return whole
    # Rows that nobody is told of lie before those of the entries.
    before = draw(st.integers(1, 3))
    rows = whole.features.joined()
    memory = np.concatenate((np.ones((before, width), rows.dtype), rows))
    features = messages.FeatureRows(dtype=dtype, segments=(memory,))
    return replace(whole, features=features, feature_offsets=whole.first_rows() + before)


HELLOS = st.builds(
    messages.Hello,
    protocol_version=UINT32,
    drafter_id=NAMES.map(DrafterId),
    incarnation=MAYBE_NAMES,
    vocab_size=st.integers(1, 2**24),
    tokenizer_hash=MAYBE_NAMES,
    methods=METHODS,
    feature_layout=st.sampled_from(messages.FeatureLayout),
    feature_fingerprint=MAYBE_NAMES,
    supports_shm=st.booleans(),
    feature_offsets=st.booleans(),
    version=MAYBE_NAMES,
)
SHM_ANSWERS = st.builds(messages.ShmAnswer, st.booleans())
LANES = st.builds(
    messages.ShmOffer,
    name=st.text("0123456789abcdef", min_size=32, max_size=32),
    token=st.binary(min_size=16, max_size=16),
)
LOST = st.builds(messages.SessionsLost, st.lists(HANDLES, min_size=1, max_size=5).map(tuple))
HEARTBEATS = st.builds(messages.Heartbeat, UINT64)
SLOTS = st.integers(0, 2**16 - 1)
BLOCKS = st.lists(IDS, max_size=40).map(tuple)
MEMORY_KINDS = st.sampled_from(messages.MemoryKind)
REPLICA_ANSWERS: st.SearchStrategy[messages.ReplicaAnswer] = st.builds(
    messages.ReplicaReady, memory=MEMORY_KINDS
) | st.builds(messages.ReplicaRefused, reason=NAMES)
REPLICA_COMMANDS: st.SearchStrategy[messages.ReplicaCommand] = st.one_of(
    st.builds(
        messages.ReplicaOffer,
        num_slots=st.integers(2, 65537),
        max_rows=st.integers(1, 65536),
        draft_length=st.integers(1, 64),
        max_chunks=st.integers(0, 1024),
        chunk_tokens=st.integers(1, 1024),
        feature_size=st.integers(1, 65536),
        feature_dtype=st.sampled_from(
            [
                messages.TensorDtype.FLOAT32,
                messages.TensorDtype.FLOAT16,
                messages.TensorDtype.BFLOAT16,
            ]
        ),
        distribution_entries=st.integers(0, 4096),
        depth=st.integers(1, 64),
        num_blocks=st.integers(1, 2**24),
        block_tokens=st.integers(1, 1024),
        table_blocks=st.integers(1, 2**20),
        vocab_size=st.integers(1, 2**24),
        memory=MEMORY_KINDS,
        fan_out=st.integers(0, 64),
        ahead_rows=st.integers(0, 64),
        gpu=st.text(max_size=16),
    ),
    st.builds(
        messages.ReplicaSessionBegin,
        slot=SLOTS,
        blocks=BLOCKS,
        sampling=SAMPLING.map(SamplingParams.for_drafter),
        num_rows=LENGTHS,
        prompt_ids=BLOCKS,
        output_ids=BLOCKS,
    ),
    st.builds(messages.ReplicaBlocksAdded, slot=SLOTS, first=st.integers(0, 2**20), blocks=BLOCKS),
    st.builds(messages.ReplicaSessionEnd, slot=SLOTS),
    st.builds(
        messages.ReplicaRoundLaunched,
        rows=st.integers(0, 65536),
        chunks=st.integers(0, 1024),
        is_sampled=st.booleans(),
        is_ahead=st.booleans(),
        has_rejection=st.booleans(),
    ),
)
DRAFTER_MESSAGES: st.SearchStrategy[messages.DrafterMessage] = (
    proposals() | HELLOS | HEARTBEATS | LOST | SHM_ANSWERS | REPLICA_ANSWERS
)
VERIFIER_MESSAGES: st.SearchStrategy[messages.VerifierMessage] = st.one_of(
    verdicts(),
    HEARTBEATS,
    st.builds(
        messages.Welcome,
        protocol_version=UINT32,
        verifier_id=NAMES.map(VerifierId),
        incarnation=MAYBE_NAMES,
        shm_offer=st.none() | LANES,
        version=MAYBE_NAMES,
    ),
    st.builds(
        messages.SessionStart,
        handle=HANDLES,
        session_id=SESSION_IDS,
        epoch=UINT64,
        plan=PLANS,
        sampling=SAMPLING.map(SamplingParams.for_drafter),
        max_len=LENGTHS,
        prompt_len=LENGTHS,
        structured_output=STRUCTURED,
        stop_token_ids=id_lists(8),
        token_limits=TOKEN_LIMITS,
        traceparent=TRACEPARENTS,
    ),
    st.builds(messages.PlanChange, handle=HANDLES, plan=PLANS),
    st.builds(messages.SessionEnd, handle=HANDLES),
    REPLICA_COMMANDS,
)


@st.composite
def session_specs(draw: st.DrawFn) -> messages.SessionSpec:
    ids = draw(st.lists(IDS, min_size=1, max_size=40).map(tuple))
    return messages.SessionSpec(
        session_id=draw(SESSION_IDS),
        epoch=draw(UINT64),
        token_ids=ids,
        prompt_len=draw(st.integers(0, len(ids))),
        max_new_tokens=draw(st.integers(1, 2**24)),
        stop_token_ids=draw(id_lists(8)),
        min_new_tokens=draw(LENGTHS),
        sampling=draw(SAMPLING),
        plan=draw(PLANS),
        drafter_id=draw(st.none() | NAMES.map(DrafterId)),
        priority=draw(st.integers(-100, 100)),
        top_logprobs=draw(st.none() | st.integers(0, 20)),
        structured_output=draw(STRUCTURED),
        token_limits=draw(TOKEN_LIMITS),
        thinking_budget=draw(THINKING_BUDGETS),
        traceparent=draw(TRACEPARENTS),
    )


SESSIONS_REQUESTS: st.SearchStrategy[messages.SessionsRequest] = (
    HEARTBEATS
    | st.builds(messages.SessionOpen, handle=UINT32, spec=session_specs())
    | st.builds(messages.SessionLeave, handle=UINT32)
    | st.builds(messages.SessionMove, handle=UINT32, drafter_id=st.none() | NAMES.map(DrafterId))
)


@st.composite
def event_logprobs(draw: st.DrawFn, counts: Any) -> messages.EventLogprobs | None:
    if draw(st.booleans()) or not len(counts):
        return None
    rows = len(counts)
    widths = np.array(draw(st.lists(st.integers(0, 21), min_size=rows, max_size=rows)), np.uint8)
    values = int((counts * widths).sum())
    top_ids = values - int(counts[widths > 0].sum())
    some = st.floats(-9999, 0, width=32)
    return messages.EventLogprobs(
        widths=widths,
        values=np.array(draw(st.lists(some, min_size=values, max_size=values)), np.float32),
        top_ids=np.array(draw(st.lists(IDS, min_size=top_ids, max_size=top_ids)), np.int32),
    )


@st.composite
def session_events(draw: st.DrawFn) -> messages.SessionEvents:
    rows = draw(st.integers(0, 8))

    def column(values: st.SearchStrategy[int], dtype: type[np.generic]) -> Any:
        return np.array(draw(st.lists(values, min_size=rows, max_size=rows)), dtype)

    counts = column(st.integers(0, 5), np.uint32)
    total = int(counts.sum())
    proposed = column(st.integers(0, 256), np.uint16)
    return messages.SessionEvents(
        handles=column(UINT32, np.uint32),
        round_ids=column(UINT32, np.uint32),
        counts=counts,
        tokens=np.array(draw(st.lists(IDS, min_size=total, max_size=total)), np.int32),
        finish_reasons=column(st.integers(0, 4), np.uint8),
        flags=column(st.integers(0, 7), np.uint8),
        proposed=proposed,
        accepted=proposed // 2,
        logprobs=draw(event_logprobs(counts)),
        cached_tokens=(
            column(st.integers(0, 2**20), np.uint32) if rows and draw(st.booleans()) else None
        ),
    )


SESSIONS_MESSAGES: st.SearchStrategy[messages.SessionsMessage] = (
    HEARTBEATS
    | session_events()
    | st.builds(
        messages.SessionFailure,
        handle=UINT32,
        code=MAYBE_NAMES,
        kind=MAYBE_NAMES,
        message=MAYBE_NAMES,
        reason=MAYBE_NAMES,
        retry_after_s=st.none() | st.floats(0, 1e6),
    )
    | st.builds(messages.SessionMoved, handle=UINT32, drafter_id=st.none() | NAMES.map(DrafterId))
    | st.builds(messages.SessionsDraining, seconds=TIMES)
)
EXCHANGE_TIMES = {
    "draft_length": st.integers(0, 64),
    "idle_us_p50": TIMES,
    "idle_rows": st.integers(0, 65536),
}
DEVICE_EXCHANGES: st.SearchStrategy[messages.DeviceExchangeInfo | None] = (
    st.none()
    | st.builds(messages.DeviceExchangeInfo, **EXCHANGE_TIMES)
    | st.builds(
        messages.DeviceExchangeInfo,
        drafter_id=NAMES.map(DrafterId),
        memory=MEMORY_KINDS,
        **EXCHANGE_TIMES,
    )
)
VERIFIER_INFOS = st.builds(
    messages.VerifierInfo,
    protocol_version=UINT32,
    verifier_id=NAMES.map(VerifierId),
    incarnation=MAYBE_NAMES,
    model_name=MAYBE_NAMES,
    vocab_size=st.integers(1, 2**24),
    tokenizer_hash=MAYBE_NAMES,
    max_context_len=LENGTHS,
    kv_block_tokens=UINT32,
    kv_total_blocks=UINT32,
    kv_free_blocks=UINT32,
    sessions=UINT32,
    max_sessions=UINT32,
    drafters=st.lists(
        st.builds(
            messages.AttachedDrafter,
            drafter_id=NAMES.map(DrafterId),
            incarnation=MAYBE_NAMES,
            methods=METHODS,
            sessions=UINT32,
            answer_ms=TIMES,
            same_host=st.booleans(),
            answers=UINT64,
            proposal_timeouts=UINT64,
            invalid=UINT64,
            silent_ms=TIMES,
        ),
        max_size=3,
    ).map(tuple),
    feature_fingerprint=MAYBE_NAMES,
    rounds_total=UINT64,
    tokens_total=UINT64,
    dtype=MAYBE_NAMES,
    round_ms_p50=TIMES,
    forward_ms_p50=TIMES,
    overhead_ms_p50=TIMES,
    in_process_methods=METHODS,
    in_process_draft_length=st.integers(0, 256),
    simulated_acceptance=MAYBE_NAMES,
    planner=MAYBE_NAMES,
    stats=STATS,
    hit_idle_us_p50=TIMES,
    draining=st.booleans(),
    waiting_sessions=UINT32,
    preemptions_swap=UINT64,
    preemptions_recompute=UINT64,
    prefix_cache_query_tokens=UINT64,
    prefix_cache_hit_tokens=UINT64,
    engine_steps=UINT64,
    device_exchange=DEVICE_EXCHANGES,
    version=MAYBE_NAMES,
)
DRAFTER_INFOS = st.builds(
    messages.DrafterInfo,
    protocol_version=UINT32,
    drafter_id=NAMES.map(DrafterId),
    incarnation=MAYBE_NAMES,
    vocab_size=st.integers(1, 2**24),
    tokenizer_hash=MAYBE_NAMES,
    methods=METHODS,
    feature_layout=st.sampled_from(messages.FeatureLayout),
    feature_fingerprint=MAYBE_NAMES,
    sessions=UINT32,
    verifiers=st.lists(NAMES, max_size=3).map(tuple),
    draft_ms_p50=TIMES,
    handicap=MAYBE_NAMES,
    draining=st.booleans(),
    max_sessions=UINT32,
    version=MAYBE_NAMES,
)
REMOVED = st.builds(RemovedDrafter, num_moved=UINT32, num_remaining=UINT32)
