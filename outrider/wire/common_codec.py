"""Codec of types that several messages share: enums, sampling, plans and statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeVar

from google.protobuf.message import Message

from outrider.ids import DrafterId
from outrider.spec.plan import MAX_DRAFT_TOKENS, DraftMethod, SpeculationPlan
from outrider.spec.sampling import MAX_BANNED_IDS, MAX_BIASED_IDS, Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.token_limits import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    TokenLimits,
)
from outrider.wire.checks import (
    check_count,
    check_finite,
    check_number,
    check_text,
    check_token_ids,
    convert_validation_errors,
    raise_invalid,
)
from outrider.wire.limits import (
    MAX_DECISION_BYTES,
    MAX_DRAFT_LENGTH,
    MAX_METHODS,
    MAX_ROUND_ROWS,
)
from outrider.wire.messages import (
    DeviceExchangeInfo,
    FeatureLayout,
    FinishReason,
    MemoryKind,
    SpecStats,
)
from outrider.wire.v1 import common_pb2 as pb

EnumT = TypeVar("EnumT", bound=StrEnum)

REMEMBERED: Final = 256
"""Size of each of two caches: one of decoded plans, and one of decoded sampling parameters without
seeds. Hundreds of sessions have equal ones, and validating them costs more than decoding the rest
of a session's first message.
"""
REMEMBERED_BYTES: Final = 256
"""Largest size in bytes of encoded plans and sampling parameters that are cached. The limit
prevents a peer from filling the memory.
"""

RULES: dict[Rule, pb.Rule] = {
    Rule.GREEDY: pb.RULE_GREEDY,
    Rule.COUPLED: pb.RULE_COUPLED,
    Rule.REJECTION: pb.RULE_REJECTION,
    Rule.TARGET_ONLY: pb.RULE_TARGET_ONLY,
}
METHODS: dict[DraftMethod, pb.DraftMethod] = {
    DraftMethod.NONE: pb.DRAFT_METHOD_NONE,
    DraftMethod.EAGLE3: pb.DRAFT_METHOD_EAGLE3,
    DraftMethod.EAGLE: pb.DRAFT_METHOD_EAGLE,
    DraftMethod.NGRAM: pb.DRAFT_METHOD_NGRAM,
    DraftMethod.MODEL: pb.DRAFT_METHOD_MODEL,
}
FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
LAYOUTS: dict[FeatureLayout, pb.FeatureLayout] = {
    FeatureLayout.NONE: pb.FEATURE_LAYOUT_NONE,
    FeatureLayout.PROJECTED: pb.FEATURE_LAYOUT_PROJECTED,
}
MEMORY_KINDS: dict[MemoryKind, pb.MemoryKind] = {
    MemoryKind.DEVICE: pb.MEMORY_KIND_DEVICE,
    MemoryKind.HOST: pb.MEMORY_KIND_HOST,
}


def _invert(table: Mapping[EnumT, int]) -> dict[int, EnumT]:
    return {int(value): member for member, value in table.items()}


RULES_FROM_PB = _invert(RULES)
METHODS_FROM_PB = _invert(METHODS)
FINISH_REASONS_FROM_PB = _invert(FINISH_REASONS)
LAYOUTS_FROM_PB = _invert(LAYOUTS)
MEMORY_KINDS_FROM_PB = _invert(MEMORY_KINDS)


def require_member(table: Mapping[int, EnumT], value: int, name: str) -> EnumT:
    """Return the enum member for a protobuf value. Raises InvalidMessageError for unspecified and
    unknown values.
    """
    member = table.get(value)
    if member is None:
        raise_invalid(f"{name} must be one of {sorted(table)}, got {value}")
    return member


def optional_member(table: Mapping[int, EnumT], value: int, name: str) -> EnumT | None:
    """Return the enum member for a protobuf value, or None if it is unspecified (0). Raises
    InvalidMessageError for unknown values.
    """
    return None if value == 0 else require_member(table, value, name)


def methods_from_pb(values: Collection[int]) -> tuple[DraftMethod, ...]:
    """Decode the draft methods of a handshake or info message."""
    check_count(values, "methods", high=MAX_METHODS)
    return tuple(require_member(METHODS_FROM_PB, value, "method") for value in values)


def sampling_to_pb(params: SamplingParams) -> pb.Sampling:
    """Encode sampling parameters."""
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        banned_ids=params.banned_ids,
        seed=params.seed,
        draft_key=params.draft_key,
        rule=RULES[params.rule],
        logit_bias=bias_to_pb(params.logit_bias),
    )


def bias_to_pb(entries: Iterable[tuple[int, float]]) -> list[pb.LogitBias]:
    """Encode a logit bias: pairs of a token id and the value that is added to its logit."""
    return [pb.LogitBias(id=id_, amount=amount) for id_, amount in entries]


def bias_from_pb(messages: Collection[pb.LogitBias]) -> tuple[tuple[int, float], ...]:
    """Decode a logit bias: pairs of a token id and the value that is added to its logit. The values
    are not checked.
    """
    check_count(messages, "logit_bias", high=MAX_BIASED_IDS)
    ids = check_token_ids([message.id for message in messages], "logit_bias", high=MAX_BIASED_IDS)
    return tuple(zip(ids, (message.amount for message in messages), strict=True))


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Decode and validate sampling parameters."""
    if message.banned_ids or message.logit_bias:
        # Lists may be long: they are counted before anything else.
        params = _common_sampling(message)
    else:
        common = pb.Sampling()
        common.CopyFrom(message)
        common.ClearField("seed")
        common.ClearField("draft_key")
        data = common.SerializeToString()
        few = len(data) <= REMEMBERED_BYTES
        params = _sampling_of(data) if few else _common_sampling(message)
    with convert_validation_errors("sampling"):
        return params.with_noise(
            seed=message.seed,
            draft_key=message.draft_key if message.HasField("draft_key") else None,
        )


@lru_cache(maxsize=REMEMBERED)
def _sampling_of(data: bytes) -> SamplingParams:
    return _common_sampling(pb.Sampling.FromString(data))


def _common_sampling(message: pb.Sampling) -> SamplingParams:
    """Decode and validate all sampling parameters except for seed and draft key."""
    banned = check_token_ids(message.banned_ids, "banned_ids", high=MAX_BANNED_IDS)
    bias = bias_from_pb(message.logit_bias)
    with convert_validation_errors("sampling"):
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            repetition_penalty=(
                message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
            ),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            banned_ids=banned,
            rule=optional_member(RULES_FROM_PB, message.rule, "rule") or Rule.COUPLED,
            logit_bias=bias,
        )


def verifier_sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Decode the sampling parameters for a verifier, which must have a seed and no draft key."""
    if message.HasField("draft_key"):
        raise_invalid("sampling must bring a seed, not a drafter's key")
    return sampling_from_pb(message)


def drafter_sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Decode the sampling parameters for a drafter, which must have a draft key. A drafter never
    gets the seed.
    """
    if not message.HasField("draft_key"):
        raise_invalid("sampling must bring a drafter's key")
    return sampling_from_pb(message)


def structured_to_pb(structured: StructuredOutput | None) -> pb.StructuredOutput | None:
    """Encode the schema, expression or grammar of a structured output. Returns None for None."""
    match structured:
        case None:
            return None
        case StructuredOutput(kind=StructuredKind.JSON_OBJECT):
            return pb.StructuredOutput(json_object=True)
        case StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=found):
            return pb.StructuredOutput(json_schema=found)
        case StructuredOutput(kind=StructuredKind.REGEX, text=found):
            return pb.StructuredOutput(regex=found)
        case StructuredOutput(text=found):
            return pb.StructuredOutput(grammar=found)


def structured_from_pb(holder: Message) -> StructuredOutput | None:
    """Decode the schema, expression or grammar of a structured output from the field
    `structured_output` of `holder`. Returns None if the field is not set.
    """
    if not holder.HasField("structured_output"):
        return None
    message: pb.StructuredOutput = getattr(holder, "structured_output")  # noqa: B009
    which = message.WhichOneof("kind")
    if which is None or (which == "json_object" and not message.json_object):
        raise_invalid(
            "structured_output must be one of json_schema, json_object, regex and grammar"
        )
    found = "" if which == "json_object" else getattr(message, which)
    with convert_validation_errors("structured_output"):
        return StructuredOutput(StructuredKind(which), found)


def token_limits_to_pb(limits: TokenLimits | None) -> pb.TokenLimits | None:
    """Encode the allowed token ids and bad words of an answer. Returns None for None."""
    if limits is None:
        return None
    words = [pb.TokenSequence(token_ids=word) for word in limits.bad_words]
    return pb.TokenLimits(allowed_ids=limits.allowed_ids, bad_words=words)


def token_limits_from_pb(holder: Message) -> TokenLimits | None:
    """Decode and validate the allowed token ids and bad words of an answer from the field
    `token_limits` of `holder`. Returns None if the field is not set.
    """
    if not holder.HasField("token_limits"):
        return None
    message: pb.TokenLimits = getattr(holder, "token_limits")  # noqa: B009
    allowed = check_token_ids(message.allowed_ids, "allowed_ids", high=MAX_ALLOWED_IDS)
    check_count(message.bad_words, "bad_words", high=MAX_BAD_WORDS)
    words = [
        check_token_ids(word.token_ids, "bad_words", high=MAX_BAD_WORD_TOKENS)
        for word in message.bad_words
    ]
    with convert_validation_errors("token_limits"):
        return TokenLimits(allowed_ids=allowed, bad_words=tuple(words))


def plan_to_pb(plan: SpeculationPlan) -> pb.Plan:
    """Encode a plan."""
    return pb.Plan(
        method=METHODS[plan.method],
        draft_tokens=plan.draft_tokens,
        top_k=plan.top_k,
        depth=plan.depth,
        look_ahead=plan.look_ahead,
        fan_out=plan.fan_out,
        proposal_timeout_ms=plan.proposal_timeout_ms,
    )


_DEFAULT_PLAN = SpeculationPlan()


def plan_from_pb(message: pb.Plan) -> SpeculationPlan:
    """Decode and validate a plan."""
    data = message.SerializeToString()
    return _plan_of(data) if len(data) <= REMEMBERED_BYTES else _plan(message)


@lru_cache(maxsize=REMEMBERED)
def _plan_of(data: bytes) -> SpeculationPlan:
    return _plan(pb.Plan.FromString(data))


def _plan(message: pb.Plan) -> SpeculationPlan:
    default = _DEFAULT_PLAN
    with convert_validation_errors("plan"):
        return SpeculationPlan(
            method=optional_member(METHODS_FROM_PB, message.method, "method") or default.method,
            draft_tokens=(
                message.draft_tokens if message.HasField("draft_tokens") else default.draft_tokens
            ),
            top_k=message.top_k if message.HasField("top_k") else default.top_k,
            depth=message.depth,
            look_ahead=message.look_ahead,
            fan_out=message.fan_out,
            proposal_timeout_ms=(
                message.proposal_timeout_ms
                if message.HasField("proposal_timeout_ms")
                else default.proposal_timeout_ms
            ),
        )


def stats_to_pb(stats: SpecStats) -> pb.SpecDecodeStats:
    """Encode speculation statistics."""
    return pb.SpecDecodeStats(
        rounds=stats.rounds,
        emitted=stats.emitted,
        proposed=stats.proposed,
        accepted=stats.accepted,
        fallback_rounds=stats.fallback_rounds,
        target_only_rounds=stats.target_only_rounds,
        accepted_per_depth=stats.accepted_per_depth,
        mean_emitted_per_round=stats.emitted / stats.rounds if stats.rounds else 0.0,
        paused_rounds=stats.paused_rounds,
        decision=stats.decision,
        look_ahead_rounds=stats.look_ahead_rounds,
        hit_rounds=stats.hit_rounds,
        hit_accepted=stats.hit_accepted,
        fresh_rounds=stats.fresh_rounds,
        fresh_accepted=stats.fresh_accepted,
        drafted_rounds=stats.drafted_rounds,
    )


def stats_from_pb(message: pb.SpecDecodeStats) -> SpecStats:
    """Decode speculation statistics. The mean in the message is ignored, because it can be computed
    from the other fields.
    """
    check_count(message.accepted_per_depth, "accepted_per_depth", high=MAX_DRAFT_TOKENS)
    return SpecStats(
        rounds=message.rounds,
        emitted=message.emitted,
        proposed=message.proposed,
        accepted=message.accepted,
        fallback_rounds=message.fallback_rounds,
        target_only_rounds=message.target_only_rounds,
        accepted_per_depth=tuple(message.accepted_per_depth),
        paused_rounds=message.paused_rounds,
        decision=check_text(message.decision, "decision", limit=MAX_DECISION_BYTES, empty=True),
        look_ahead_rounds=message.look_ahead_rounds,
        hit_rounds=message.hit_rounds,
        hit_accepted=message.hit_accepted,
        fresh_rounds=message.fresh_rounds,
        fresh_accepted=message.fresh_accepted,
        drafted_rounds=message.drafted_rounds,
    )


def device_exchange_to_pb(info: DeviceExchangeInfo | None) -> pb.DeviceExchangeInfo | None:
    """Encode the state of a verifier's device exchange. Returns None if it is off."""
    if info is None:
        return None
    memory = pb.MEMORY_KIND_UNSPECIFIED if info.memory is None else MEMORY_KINDS[info.memory]
    return pb.DeviceExchangeInfo(
        drafter_id=info.drafter_id,
        memory=memory,
        draft_length=info.draft_length,
        idle_us_p50=info.idle_us_p50,
        idle_rows=info.idle_rows,
    )


def device_exchange_from_pb(message: pb.DeviceExchangeInfo) -> DeviceExchangeInfo:
    """Decode the state of a verifier's device exchange."""
    is_open = message.HasField("drafter_id")
    return DeviceExchangeInfo(
        drafter_id=DrafterId(check_text(message.drafter_id, "drafter_id")) if is_open else None,
        memory=require_member(MEMORY_KINDS_FROM_PB, message.memory, "memory") if is_open else None,
        draft_length=check_number(message.draft_length, "draft_length", high=MAX_DRAFT_LENGTH),
        idle_us_p50=check_finite(message.idle_us_p50, "idle_us_p50"),
        idle_rows=check_number(message.idle_rows, "idle_rows", high=MAX_ROUND_ROWS),
    )
