"""Hypothesis strategies for the public API's messages."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tools import Tool, ToolCall, ToolCallDelta, ToolChoiceMode, ToolOptions
from outrider.wire import inference, messages
from tests.wire.strategies import (
    BIASES,
    DEVICE_EXCHANGES,
    IDS,
    LENGTHS,
    MAYBE_NAMES,
    METHODS,
    NAMES,
    STATS,
    STRUCTURED,
    TIMES,
    UINT32,
    UINT64,
    id_lists,
)

CALLS = st.builds(ToolCall, call_id=MAYBE_NAMES, name=NAMES, arguments=MAYBE_NAMES)
TOOLS = st.builds(
    Tool,
    name=NAMES,
    description=MAYBE_NAMES,
    parameters=MAYBE_NAMES,
    strict=st.none() | st.booleans(),
)
CHATS = st.builds(
    inference.ChatPrompt,
    st.lists(
        st.builds(
            inference.ChatMessage,
            role=NAMES,
            content=MAYBE_NAMES,
            tool_calls=st.lists(CALLS, max_size=2).map(tuple),
            tool_call_id=MAYBE_NAMES,
            name=MAYBE_NAMES,
            reasoning=MAYBE_NAMES,
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    tools=st.builds(
        ToolOptions,
        tools=st.lists(TOOLS, max_size=2).map(tuple),
        choice=st.sampled_from(ToolChoiceMode),
        named=MAYBE_NAMES,
        parallel=st.booleans(),
    ),
    template_variables=MAYBE_NAMES,
    reasoning_effort=st.none() | NAMES,
    thinking_token_budget=st.none() | st.integers(0, 1 << 24),
)
CALL_DELTAS = st.builds(
    ToolCallDelta,
    index=st.integers(0, 1000),
    call_id=MAYBE_NAMES,
    name=MAYBE_NAMES,
    arguments=MAYBE_NAMES,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
REQUESTS = st.builds(
    inference.GenerateRequest,
    prompt=st.one_of(
        TEXTS.map(inference.TextPrompt),
        st.lists(IDS, min_size=1, max_size=20).map(lambda ids: inference.TokenPrompt(tuple(ids))),
        CHATS,
    ),
    request_id=st.none() | NAMES.map(RequestId),
    model=st.none() | NAMES,
    sampling=st.builds(
        inference.SamplingOptions,
        temperature=st.none() | st.floats(allow_nan=False),
        top_p=st.none() | st.floats(allow_nan=False),
        top_k=st.none() | UINT32,
        min_p=st.none() | st.floats(allow_nan=False),
        repetition_penalty=st.none() | st.floats(allow_nan=False),
        presence_penalty=st.none() | st.floats(allow_nan=False),
        frequency_penalty=st.none() | st.floats(allow_nan=False),
        seed=st.none() | UINT64,
        rule=st.none() | st.sampled_from(Rule),
        banned_token_ids=id_lists(),
        logit_bias=BIASES,
        allowed_token_ids=id_lists(),
        bad_words=st.lists(TEXTS, max_size=4).map(tuple),
    ),
    stopping=st.builds(
        inference.StoppingOptions,
        max_tokens=st.none() | LENGTHS,
        min_tokens=st.none() | LENGTHS,
        stop=st.lists(TEXTS, max_size=4).map(tuple),
        stop_token_ids=id_lists(8),
        ignore_eos=st.none() | st.booleans(),
        include_stop_str_in_output=st.booleans(),
    ),
    speculation=st.builds(
        inference.SpeculationOptions,
        enabled=st.none() | st.booleans(),
        method=st.none() | st.sampled_from(DraftMethod),
        draft_tokens=st.none() | UINT32,
        draft_top_k=st.none() | UINT32,
        look_ahead=st.none() | UINT32,
        fan_out=st.none() | UINT32,
    ),
    priority=st.integers(-100, 100),
    resumable=st.booleans(),
    top_logprobs=st.none() | st.integers(0, 20),
    structured_output=STRUCTURED,
    skip_special_tokens=st.none() | st.booleans(),
    return_prompt_token_ids=st.booleans(),
)
POSITIONS = st.builds(
    inference.StreamPosition,
    request_id=NAMES.map(RequestId),
    tokens=st.integers(0, 2**24),
    characters=st.integers(0, 2**32 - 1),
)


@st.composite
def usages(draw: st.DrawFn) -> inference.Usage:
    prompt_tokens = draw(UINT32)
    return inference.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=draw(UINT32),
        reasoning_tokens=draw(UINT32),
        cached_tokens=draw(st.integers(0, prompt_tokens)),
    )


FINISHES = st.one_of(
    *(
        st.builds(
            inference.FinishInfo,
            reason=st.sampled_from(messages.FinishReason),
            usage=usages(),
            stats=STATS,
            **match,
        )
        for match in ({"stop_string": st.none() | TEXTS}, {"stop_token_id": UINT32})
    )
)
LOGPROBS = st.floats(-9999, 0, width=32)
TOKEN_LOGPROBS = st.builds(
    inference.TokenLogprobs,
    LOGPROBS,
    st.lists(st.tuples(IDS, LOGPROBS), max_size=20).map(tuple),
)


@st.composite
def with_logprobs(draw: st.DrawFn, kind: type[Any], **fields: st.SearchStrategy[Any]) -> Any:
    """Something with ids, and logprobs for all of them or none."""
    ids = draw(id_lists(8))
    entries = st.lists(TOKEN_LOGPROBS, min_size=len(ids), max_size=len(ids)).map(tuple)
    values = {name: draw(strategy) for name, strategy in fields.items()}
    return kind(token_ids=ids, logprobs=draw(st.just(()) | entries), **values)


EVENTS: st.SearchStrategy[inference.StreamEvent] = st.one_of(
    st.builds(
        inference.PromptInfo,
        request_id=NAMES.map(RequestId),
        prompt_tokens=UINT32,
        model=MAYBE_NAMES,
    ),
    with_logprobs(
        inference.Delta,
        text=MAYBE_NAMES,
        reasoning=MAYBE_NAMES,
        tool_calls=st.lists(CALL_DELTAS, max_size=3).map(tuple),
        characters=UINT32,
    ),
    FINISHES,
)
RESULTS = with_logprobs(
    inference.GenerateResult,
    request_id=NAMES.map(RequestId),
    model=MAYBE_NAMES,
    text=MAYBE_NAMES,
    finish=FINISHES,
    prompt_token_ids=id_lists(),
    reasoning=MAYBE_NAMES,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
)
SERVER_INFOS = st.builds(
    inference.ServerInfo,
    version=MAYBE_NAMES,
    protocol_version=UINT32,
    queued=UINT32,
    queue_bound=UINT32,
    running=UINT32,
    verifiers=st.lists(
        st.builds(
            inference.VerifierSummary,
            verifier_id=NAMES.map(VerifierId),
            address=NAMES,
            healthy=st.booleans(),
            model=MAYBE_NAMES,
            sessions=UINT32,
            max_sessions=UINT32,
            kv_free_blocks=UINT32,
            kv_total_blocks=UINT32,
            in_process_methods=METHODS,
            simulated_acceptance=MAYBE_NAMES,
            planner=MAYBE_NAMES,
            stats=STATS,
            hit_idle_us_p50=TIMES,
            draining=st.booleans(),
            waiting_sessions=UINT32,
            preemptions_swap=UINT32,
            preemptions_recompute=UINT32,
            prefix_cache_query_tokens=UINT32,
            prefix_cache_hit_tokens=UINT32,
            device_exchange=DEVICE_EXCHANGES,
            problem=MAYBE_NAMES,
        ),
        max_size=2,
    ).map(tuple),
    drafters=st.lists(
        st.builds(
            inference.DrafterSummary,
            drafter_id=NAMES.map(DrafterId),
            address=NAMES,
            healthy=st.booleans(),
            methods=METHODS,
            sessions=UINT32,
            handicap=MAYBE_NAMES,
            draining=st.booleans(),
            problem=MAYBE_NAMES,
            links=st.lists(
                st.builds(
                    inference.DrafterLink,
                    verifier_id=NAMES.map(VerifierId),
                    sessions=UINT32,
                    answer_ms=TIMES,
                    quarantine=MAYBE_NAMES,
                    probe_in_s=TIMES,
                ),
                max_size=2,
            ).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)
MODELS = st.lists(
    st.builds(
        inference.ModelInfo,
        name=NAMES,
        vocab_size=UINT32,
        max_context_len=UINT32,
        tokenizer_hash=MAYBE_NAMES,
    ),
    max_size=3,
).map(tuple)
