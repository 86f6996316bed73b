"""One fixed sample of every message, for golden bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.ids import DrafterId, RequestId, SessionId, VerifierId
from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tools import Tool, ToolCall, ToolCallDelta, ToolChoiceMode, ToolOptions
from outrider.spec.tree import DraftTree
from outrider.wire import inference as api
from outrider.wire import messages as m
from outrider.wire.pool_codec import RemovedDrafter
from tests.wire.message_types import KINDS

SESSION = SessionId("router-1/42")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SAMPLING = SamplingParams(
    temperature=0.75,
    top_k=50,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    banned_ids=(3, 70000),
    logit_bias=((7, -2.5), (70000, 100.0)),
    seed=2**64 - 3,
    rule=Rule.REJECTION,
)
PLAN = SpeculationPlan(
    method=DraftMethod.EAGLE3,
    draft_tokens=32,
    top_k=8,
    depth=6,
    look_ahead=1,
    fan_out=3,
    proposal_timeout_ms=250,
)
STATS = m.SpecStats(
    rounds=10,
    emitted=31,
    proposed=40,
    accepted=21,
    fallback_rounds=1,
    target_only_rounds=2,
    accepted_per_depth=(9, 7, 5),
    paused_rounds=4,
    decision="speculate/faster",
    look_ahead_rounds=9,
    hit_rounds=6,
    hit_accepted=13,
    fresh_rounds=2,
    fresh_accepted=5,
    drafted_rounds=8,
)
TREE = DraftTree(
    tokens=np.array([11, 12, 49151], dtype=np.int32),
    parents=np.array([-1, -1, 0], dtype=np.int32),
    logprobs=np.array([-0.25, -1.5, -0.75], dtype=np.float32),
)
LAW = DraftDistribution(
    offsets=np.array([0, 2, 3, 3, 3], dtype=np.int32),
    ids=np.array([11, 12, 49151], dtype=np.int32),
    counts=np.array([60000, 5535, 1], dtype=np.uint16),
)
START = m.SessionStart(
    handle=1,
    session_id=SESSION,
    epoch=1,
    plan=PLAN,
    sampling=SAMPLING.for_drafter(),
    max_len=612,
    prompt_len=100,
)
VERDICT = m.Verdict(
    handle=70000,
    start=100,
    tokens=np.array([11, 49151, 7], dtype=np.int32),
    prefix_digest=0xFEDCBA9876543210,
    feature_start=99,
    features=m.WireTensor(
        dtype=m.TensorDtype.BFLOAT16, data=np.array([[0x3F80, 0], [0xBF80, 1]], dtype=np.uint16)
    ),
    draft_wanted=True,
)
VERDICTS = m.Verdicts.of_verdicts(
    [
        VERDICT,
        m.Verdict(
            handle=3,
            start=0,
            tokens=np.array([5, 6], dtype=np.int32),
            prefix_digest=0x0123456789ABCDEF,
            feature_start=0,
            features=None,
            draft_wanted=False,
        ),
    ]
)
VERDICTS_IN_PLACE = replace(
    VERDICTS,
    features=m.FeatureRows(
        dtype=m.TensorDtype.BFLOAT16,
        segments=(np.arange(10, dtype=np.uint16).reshape(5, 2),),
    ),
    feature_offsets=np.array([2, 0]),
)
PROPOSAL = m.Proposal(
    handle=70000, prefix_digest=0x0123456789ABCDEF, prefix_len=100, tree=TREE, distribution=LAW
)
CHAIN = m.Proposal(
    handle=3,
    prefix_digest=2**64 - 1,
    prefix_len=7,
    tree=DraftTree.chain(np.array([8, 9], dtype=np.int32)),
)
FINISH = api.FinishInfo(
    reason=m.FinishReason.STOP_STRING,
    usage=api.Usage(prompt_tokens=12, completion_tokens=34),
    stats=STATS,
    stop_string="\n\n",
)
HELLO = m.Hello(
    protocol_version=1,
    drafter_id=DrafterId("drafter-a"),
    incarnation="1f2e",
    vocab_size=49152,
    tokenizer_hash="ab" * 32,
    methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM),
    feature_layout=m.FeatureLayout.PROJECTED,
    feature_fingerprint="cd" * 8,
)
REPLICA_OFFER = m.ReplicaOffer(
    num_slots=65537,
    max_rows=256,
    draft_length=7,
    max_chunks=16,
    chunk_tokens=512,
    feature_size=4096,
    feature_dtype=m.TensorDtype.BFLOAT16,
    distribution_entries=32,
    depth=4,
    num_blocks=2**24,
    block_tokens=16,
    table_blocks=8192,
    vocab_size=49152,
    memory=m.MemoryKind.DEVICE,
)
SAMPLES: dict[str, tuple[str, Any]] = {
    "proposals": ("drafter", m.Proposals.of_proposals([CHAIN, PROPOSAL], draft_us=1234)),
    "chains": ("drafter", m.Proposals.of_proposals([CHAIN])),
    "hello": ("drafter", HELLO),
    "hello_offsets": (
        "drafter",
        replace(
            HELLO,
            tokenizer_hash="",
            methods=(DraftMethod.EAGLE3,),
            supports_shm=True,
            feature_offsets=True,
        ),
    ),
    "hello_lanes": (
        "drafter",
        replace(
            HELLO,
            tokenizer_hash="",
            methods=(DraftMethod.NGRAM,),
            feature_layout=m.FeatureLayout.NONE,
            feature_fingerprint="",
            supports_shm=True,
        ),
    ),
    "shm_answer": ("drafter", m.ShmAnswer(is_joined=True)),
    "sessions_lost": ("drafter", m.SessionsLost((3, 70000))),
    "drafter_heartbeat": ("drafter", m.Heartbeat(7)),
    "verdicts": ("verifier", VERDICTS),
    "verdicts_in_place": ("verifier", VERDICTS_IN_PLACE),
    "welcome": (
        "verifier",
        m.Welcome(protocol_version=1, verifier_id=VerifierId("verifier-a"), incarnation="9a8b"),
    ),
    "welcome_lane": (
        "verifier",
        m.Welcome(
            protocol_version=1,
            verifier_id=VerifierId("verifier-a"),
            incarnation="9a8b",
            shm_offer=m.ShmOffer(name="0123456789abcdef" * 2, token=bytes(range(16))),
        ),
    ),
    "session_start": (
        "verifier",
        replace(START, handle=70000, epoch=2, traceparent=TRACEPARENT),
    ),
    "structured_start": (
        "verifier",
        replace(
            START,
            handle=3,
            structured_output=StructuredOutput(StructuredKind.JSON_SCHEMA, '{"type": "object"}'),
            stop_token_ids=(2, 49151),
        ),
    ),
    "limited_start": (
        "verifier",
        replace(
            START,
            handle=4,
            token_limits=TokenLimits(allowed_ids=(5, 49151), bad_words=((5, 6), (7,))),
        ),
    ),
    "plan_change": ("verifier", m.PlanChange(handle=70000, plan=SpeculationPlan())),
    "session_end": ("verifier", m.SessionEnd(handle=2**20 - 1)),
    "verifier_heartbeat": ("verifier", m.Heartbeat(2**64 - 1)),
    "replica_offer": ("verifier", REPLICA_OFFER),
    "replica_session_begin": (
        "verifier",
        m.ReplicaSessionBegin(
            slot=65535, blocks=(3, 0, 2**24 - 1), sampling=SAMPLING.for_drafter(), num_rows=40
        ),
    ),
    "replica_blocks_added": (
        "verifier",
        m.ReplicaBlocksAdded(slot=7, first=2**20, blocks=(300,)),
    ),
    "replica_session_end": ("verifier", m.ReplicaSessionEnd(slot=65535)),
    "replica_round_launched": (
        "verifier",
        m.ReplicaRoundLaunched(rows=65536, chunks=3, is_sampled=True),
    ),
    "replica_ready": ("drafter", m.ReplicaReady(memory=m.MemoryKind.HOST)),
    "replica_refused": ("drafter", m.ReplicaRefused(reason="out of device memory: K\u00f6ln")),
    "session_open": (
        "sessions_request",
        m.SessionOpen(
            7,
            m.SessionSpec(
                session_id=SESSION,
                epoch=2,
                token_ids=(1, 2, 300, 49151),
                prompt_len=3,
                max_new_tokens=64,
                stop_token_ids=(2,),
                min_new_tokens=1,
                sampling=SAMPLING,
                plan=PLAN,
                drafter_id=DrafterId("drafter-a"),
                priority=-5,
                structured_output=StructuredOutput(StructuredKind.REGEX, "[0-9]+"),
                traceparent=TRACEPARENT,
            ),
        ),
    ),
    "limited_open": (
        "sessions_request",
        m.SessionOpen(
            8,
            m.SessionSpec(
                session_id=SESSION,
                epoch=1,
                token_ids=(1, 2),
                prompt_len=2,
                max_new_tokens=64,
                stop_token_ids=(2,),
                sampling=SAMPLING,
                plan=PLAN,
                token_limits=TokenLimits(bad_words=((300, 7, 49151),)),
            ),
        ),
    ),
    "session_open_with_thinking_budget": (
        "sessions_request",
        m.SessionOpen(
            9,
            m.SessionSpec(
                session_id=SESSION,
                epoch=1,
                token_ids=(1, 2),
                prompt_len=2,
                max_new_tokens=64,
                stop_token_ids=(2,),
                sampling=SAMPLING,
                plan=PLAN,
                thinking_budget=ThinkingBudget(
                    max_tokens=300,
                    open_tag="<think>",
                    open_ids=(7,),
                    close_tag="</think>",
                    close_ids=(300, 49151),
                ),
            ),
        ),
    ),
    "session_leave": ("sessions_request", m.SessionLeave(7)),
    "session_move": ("sessions_request", m.SessionMove(7, DrafterId("drafter-b"))),
    "session_abandoned": ("sessions_request", m.SessionMove(7, None)),
    "session_moved": ("sessions_message", m.SessionMoved(7, DrafterId("drafter-b"))),
    "sessions_draining": ("sessions_message", m.SessionsDraining(2.5)),
    "session_events": (
        "sessions_message",
        m.SessionEvents(
            handles=np.array([7, 2**32 - 1], np.uint32),
            round_ids=np.array([9, 0], np.uint32),
            counts=np.array([3, 1], np.uint32),
            tokens=np.array([11, 49151, 7, 5], np.int32),
            finish_reasons=np.array([m.REASON_CODES[m.FinishReason.LENGTH], 0], np.uint8),
            flags=np.array([m.DRAFTER_ATTACHED | m.TARGET_ONLY, m.FALLBACK | m.PLANNED], np.uint8),
            proposed=np.array([256, 0], np.uint16),
            accepted=np.array([2, 0], np.uint16),
        ),
    ),
    "session_failure": (
        "sessions_message",
        m.SessionFailure(
            handle=7,
            code="RESOURCE_EXHAUSTED",
            kind="ResourceExhaustedError",
            message="no blocks",
            reason="KV_EXHAUSTED",
            retry_after_s=1.5,
        ),
    ),
    "set_plan": ("set_plan", (SESSION, PLAN)),
    "close_session": ("close_session", SESSION),
    "attach": ("address", "10.0.0.1:7001"),
    "drain": ("drain", True),
    "verifier_info": (
        "verifier_info",
        m.VerifierInfo(
            protocol_version=1,
            verifier_id=VerifierId("verifier-a"),
            incarnation="9a8b",
            model_name="smollm2-135m",
            vocab_size=49152,
            tokenizer_hash="ab" * 32,
            max_context_len=8192,
            kv_block_tokens=16,
            kv_total_blocks=1024,
            kv_free_blocks=1000,
            sessions=3,
            max_sessions=64,
            drafters=(
                m.AttachedDrafter(
                    drafter_id=DrafterId("drafter-a"),
                    incarnation="1f2e",
                    methods=(DraftMethod.EAGLE3,),
                    sessions=3,
                ),
            ),
            feature_fingerprint="cd" * 8,
            rounds_total=1000,
            tokens_total=2500,
            dtype="bfloat16",
            round_ms_p50=120.5,
            forward_ms_p50=118.25,
            overhead_ms_p50=2.25,
        ),
    ),
    "own_verifier_info": (
        "verifier_info",
        m.VerifierInfo(
            protocol_version=1,
            verifier_id=VerifierId("verifier-a"),
            incarnation="9a8b",
            model_name="smollm2-135m",
            vocab_size=49152,
            tokenizer_hash="",
            max_context_len=8192,
            kv_block_tokens=16,
            kv_total_blocks=1024,
            kv_free_blocks=1000,
            sessions=3,
            max_sessions=64,
            drafters=(),
            in_process_methods=(DraftMethod.EAGLE3,),
            in_process_draft_length=3,
            simulated_acceptance="2.6",
            planner="eagle3 chain of 4: plain (probe)",
            stats=STATS,
            hit_idle_us_p50=87.5,
            draining=True,
            waiting_sessions=2,
            preemptions_swap=7,
            preemptions_recompute=3,
        ),
    ),
    "drafter_info": (
        "drafter_info",
        m.DrafterInfo(
            protocol_version=1,
            drafter_id=DrafterId("drafter-a"),
            incarnation="1f2e",
            vocab_size=49152,
            tokenizer_hash="ab" * 32,
            methods=(DraftMethod.EAGLE3, DraftMethod.MODEL),
            feature_layout=m.FeatureLayout.NONE,
            feature_fingerprint="",
            sessions=3,
            verifiers=("10.0.0.1:7001", "10.0.0.2:7001"),
            draft_ms_p50=4.5,
            handicap="drafts 2x as slow",
            draining=True,
            max_sessions=128,
        ),
    ),
    "tool_request": (
        "request",
        api.GenerateRequest(
            prompt=api.ChatPrompt(
                (
                    api.ChatMessage(role="user", content="Weather?"),
                    api.ChatMessage(
                        role="assistant",
                        tool_calls=(ToolCall(call_id="call_1", name="f", arguments="{}"),),
                        reasoning="Hm.",
                    ),
                    api.ChatMessage(role="tool", content="12", tool_call_id="call_1", name="f"),
                ),
                tools=ToolOptions(
                    tools=(Tool(name="f", description="d", parameters="{}", strict=True),),
                    choice=ToolChoiceMode.NAMED,
                    named="f",
                    parallel=False,
                ),
                template_variables='{"a": 1}',
                reasoning_effort="low",
            ),
        ),
    ),
    "request": (
        "request",
        api.GenerateRequest(
            prompt=api.ChatPrompt(
                (
                    api.ChatMessage(role="system", content="Be brief."),
                    api.ChatMessage(role="user", content="Gr\u00fc\u00dfe"),
                )
            ),
            request_id=RequestId("req-1"),
            model="smollm2-135m",
            sampling=api.SamplingOptions(
                temperature=0.0,
                top_k=0,
                seed=0,
                rule=Rule.COUPLED,
                banned_token_ids=(5,),
                logit_bias=((9, 0.0), (4, -1.5)),
            ),
            stopping=api.StoppingOptions(
                max_tokens=0, stop=("\n\n",), stop_token_ids=(2,), ignore_eos=False
            ),
            speculation=api.SpeculationOptions(
                enabled=False,
                method=DraftMethod.NGRAM,
                draft_tokens=0,
                draft_top_k=1,
                look_ahead=0,
                fan_out=16,
            ),
        ),
    ),
    "thinking_request": (
        "request",
        api.GenerateRequest(
            prompt=api.ChatPrompt(
                (api.ChatMessage(role="user", content="Why?"),), thinking_token_budget=0
            ),
        ),
    ),
    "text_request": ("request", api.GenerateRequest(prompt=api.TextPrompt("Once upon"))),
    "json_request": (
        "request",
        api.GenerateRequest(
            prompt=api.TextPrompt("Once upon"),
            structured_output=StructuredOutput(StructuredKind.JSON_OBJECT),
        ),
    ),
    "grammar_request": (
        "request",
        api.GenerateRequest(
            prompt=api.TextPrompt("Once upon"),
            structured_output=StructuredOutput(StructuredKind.GRAMMAR, 'start: "a" | "b"'),
        ),
    ),
    "limited_request": (
        "request",
        api.GenerateRequest(
            prompt=api.TextPrompt("Once upon"),
            sampling=api.SamplingOptions(
                allowed_token_ids=(1, 300), bad_words=("time", "Gr\u00fc")
            ),
            stopping=api.StoppingOptions(stop=("a",), include_stop_str_in_output=True),
            skip_special_tokens=False,
            return_prompt_token_ids=True,
        ),
    ),
    "token_request": (
        "request",
        api.GenerateRequest(prompt=api.TokenPrompt((1, 2, 3)), priority=7, resumable=True),
    ),
    "resume": (
        "resume",
        api.StreamPosition(request_id=RequestId("req-1"), tokens=12, characters=40),
    ),
    "prompt_ids": (
        "event",
        api.PromptInfo(
            request_id=RequestId("req-1"), prompt_tokens=2, model="m", prompt_token_ids=(1, 300)
        ),
    ),
    "prompt_info": (
        "event",
        api.PromptInfo(request_id=RequestId("req-1"), prompt_tokens=12, model="smollm2-135m"),
    ),
    "resumed_event": ("resumed_event", api.Delta(text="on", token_ids=(402,))),
    "tool_delta": (
        "event",
        api.Delta(
            text="",
            token_ids=(7,),
            reasoning="Hm.",
            tool_calls=(ToolCallDelta(index=1, call_id="call_1", name="f", arguments="{"),),
            characters=40,
        ),
    ),
    "delta": ("event", api.Delta(text="\u65e5\u672c", token_ids=(400, 401))),
    "finish": ("event", FINISH),
    "result": (
        "result",
        api.GenerateResult(
            request_id=RequestId("req-1"),
            model="smollm2-135m",
            text="done",
            token_ids=(9, 8, 7),
            finish=FINISH,
        ),
    ),
    "abort": ("abort", (RequestId("req-1"), RequestId("req-2"))),
    "models": (
        "models",
        (
            api.ModelInfo(
                name="smollm2-135m",
                vocab_size=49152,
                max_context_len=8192,
                tokenizer_hash="ab" * 32,
            ),
        ),
    ),
}
LOGPROBS = (
    api.TokenLogprobs(-0.25, ((400, -0.25), (7, -2.5))),
    api.TokenLogprobs(-9999.0),
)
SAMPLES["logprobs_request"] = (
    "request",
    api.GenerateRequest(prompt=api.TokenPrompt((1, 2, 3)), top_logprobs=0),
)
SAMPLES["logprobs_open"] = (
    "sessions_request",
    m.SessionOpen(7, replace(SAMPLES["session_open"][1].spec, top_logprobs=20)),
)
SAMPLES["logprobs_delta"] = (
    "event",
    api.Delta(text="\u65e5\u672c", token_ids=(400, 401), logprobs=LOGPROBS),
)
SAMPLES["logprobs_result"] = (
    "result",
    replace(SAMPLES["result"][1], token_ids=(9, 8), logprobs=LOGPROBS),
)
SAMPLES["logprobs_events"] = (
    "sessions_message",
    m.SessionEvents(
        handles=np.array([7, 8, 9], np.uint32),
        round_ids=np.array([9, 3, 0], np.uint32),
        counts=np.array([2, 3, 1], np.uint32),
        tokens=np.array([11, 7, 5, 6, 7, 8], np.int32),
        finish_reasons=np.array([0, 0, 0], np.uint8),
        flags=np.array([0, 0, 0], np.uint8),
        proposed=np.array([1, 2, 0], np.uint16),
        accepted=np.array([1, 2, 0], np.uint16),
        logprobs=m.EventLogprobs(
            widths=np.array([3, 0, 1], np.uint8),
            values=np.array([-1.5, -0.5, -1.5, -0.25, -0.25, -2.0, -9999.0], np.float32),
            top_ids=np.array([12, 11, 7, 49151], np.int32),
        ),
    ),
)
SAMPLES["cached_events"] = (
    "sessions_message",
    replace(
        SAMPLES["session_events"][1],
        cached_tokens=np.array([0, 2**20], np.uint32),
    ),
)
SAMPLES["cached_finish"] = (
    "event",
    replace(
        SAMPLES["finish"][1],
        usage=api.Usage(
            prompt_tokens=48, completion_tokens=34, reasoning_tokens=5, cached_tokens=32
        ),
    ),
)
SAMPLES["add_drafter"] = ("add_drafter", "10.0.0.3:7001")
SAMPLES["remove_drafter"] = ("remove_drafter", "10.0.0.3:7001")
SAMPLES["removed"] = ("removed", RemovedDrafter(num_moved=12, num_remaining=1))
SAMPLES["heard_drafter"] = (
    "verifier_info",
    replace(
        SAMPLES["own_verifier_info"][1],
        drafters=(
            m.AttachedDrafter(
                drafter_id=DrafterId("drafter-a"),
                incarnation="1f2e",
                methods=(DraftMethod.EAGLE3,),
                sessions=3,
                answer_ms=1.25,
                same_host=True,
                answers=900,
                proposal_timeouts=3,
                invalid=1,
                silent_ms=750.0,
            ),
        ),
    ),
)
SAMPLES["pool"] = (
    "server_info",
    api.ServerInfo(
        version="0.1",
        protocol_version=1,
        queued=0,
        queue_bound=256,
        running=3,
        verifiers=(),
        drafters=(
            api.DrafterSummary(
                drafter_id=DrafterId("drafter-a"),
                address="10.0.0.3:7001",
                healthy=True,
                methods=(DraftMethod.EAGLE3,),
                sessions=3,
                draining=True,
                links=(
                    api.DrafterLink(
                        verifier_id=VerifierId("v"),
                        sessions=3,
                        answer_ms=1.25,
                        quarantine="slow",
                        probe_in_s=1.5,
                    ),
                ),
            ),
        ),
    ),
)
SAMPLES["drafter_bundle"] = (
    "drafter_bundle",
    tuple(SAMPLES[name][1] for name in ("proposals", "drafter_heartbeat")),
)
SAMPLES["verifier_bundle"] = (
    "verifier_bundle",
    tuple(SAMPLES[name][1] for name in ("session_start", "verdicts", "session_end")),
)
_BY_NAME = {kind.name: kind for kind in KINDS}


SAMPLES["prefix_verifier_info"] = (
    "verifier_info",
    replace(
        SAMPLES["own_verifier_info"][1],
        prefix_cache_query_tokens=90_000,
        prefix_cache_hit_tokens=30_000,
    ),
)


def encoder(name: str) -> Callable[[Any], bytes]:
    """The encoding function of a sample."""
    return _BY_NAME[SAMPLES[name][0]].encode


def decoder(name: str) -> Callable[[bytes], Any]:
    """The decoding function of a sample."""
    return _BY_NAME[SAMPLES[name][0]].decode


SAMPLES["replica_offer_ahead"] = (
    "verifier",
    replace(REPLICA_OFFER, fan_out=16, ahead_rows=2),
)
SAMPLES["replica_offer_gpu"] = (
    "verifier",
    replace(REPLICA_OFFER, gpu="8e1f0c9a-4f5e-3a57-9a6b-0c1d2e3f4a5b"),
)
SAMPLES["replica_session_begin_penalties"] = (
    "verifier",
    m.ReplicaSessionBegin(
        slot=3,
        blocks=(1,),
        sampling=SAMPLING.for_drafter(),
        num_rows=0,
        prompt_ids=(0, 2**24 - 1),
        output_ids=(7, 7, 300),
    ),
)
SAMPLES["replica_round_ahead"] = (
    "verifier",
    m.ReplicaRoundLaunched(rows=2, chunks=0, is_sampled=False, is_ahead=True),
)
SAMPLES["replica_round_rejection"] = (
    "verifier",
    m.ReplicaRoundLaunched(rows=2, chunks=0, is_sampled=True, has_rejection=True),
)
DEVICE_EXCHANGE = m.DeviceExchangeInfo(
    drafter_id=DrafterId("drafter-a"),
    memory=m.MemoryKind.DEVICE,
    draft_length=3,
    idle_us_p50=24.5,
    idle_rows=8,
)
SAMPLES["exchange_verifier_info"] = (
    "verifier_info",
    replace(SAMPLES["verifier_info"][1], device_exchange=DEVICE_EXCHANGE),
)
SAMPLES["exchange_server_info"] = (
    "server_info",
    replace(
        SAMPLES["pool"][1],
        verifiers=tuple(
            api.VerifierSummary(
                verifier_id=VerifierId(f"verifier-{name}"),
                address="10.0.0.1:7001",
                healthy=True,
                model="m",
                sessions=1,
                max_sessions=8,
                kv_free_blocks=3,
                kv_total_blocks=4,
                device_exchange=exchange,
            )
            for name, exchange in (
                ("a", DEVICE_EXCHANGE),
                ("b", replace(DEVICE_EXCHANGE, memory=m.MemoryKind.HOST)),
                ("c", m.DeviceExchangeInfo(draft_length=3)),
                ("d", None),
            )
        ),
    ),
)


for _name in ("hello", "welcome", "verifier_info", "drafter_info"):
    _kind, _message = SAMPLES[_name]
    SAMPLES[f"{_name}_version"] = (
        _kind,
        replace(_message, protocol_version=2, version="0.2.0"),
    )
SAMPLES["server_info_problem"] = (
    "server_info",
    api.ServerInfo(
        version="0.2.0",
        protocol_version=2,
        queued=0,
        queue_bound=256,
        running=0,
        verifiers=(
            api.VerifierSummary(
                verifier_id=VerifierId("verifier-a"),
                address="10.0.0.2:7000",
                healthy=False,
                model="m",
                sessions=0,
                max_sessions=8,
                kv_free_blocks=4,
                kv_total_blocks=4,
                problem="verifier verifier-a speaks protocol 1",
            ),
        ),
        drafters=(
            api.DrafterSummary(
                drafter_id=DrafterId("drafter-a"),
                address="10.0.0.3:7001",
                healthy=False,
                methods=(),
                sessions=0,
                problem="no answer in time",
            ),
        ),
    ),
)
