"""Codec of responses of the inference API: generate results, stream events and resumed streams.

The functions `*_from_pb` raise InvalidMessageError, a subclass of InvalidRequestError, for invalid
messages.
"""

from __future__ import annotations

from outrider.ids import RequestId
from outrider.spec.tools import ToolCallDelta, join_call_deltas
from outrider.wire.checks import (
    check_logprob,
    check_number,
    check_text,
    check_token_ids,
    raise_invalid,
)
from outrider.wire.common_codec import (
    FINISH_REASONS,
    FINISH_REASONS_FROM_PB,
    require_member,
    stats_from_pb,
    stats_to_pb,
)
from outrider.wire.inference import (
    MAX_TOP_LOGPROBS,
    Delta,
    FinishInfo,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    TokenLogprobs,
    Usage,
)
from outrider.wire.limits import MAX_SEQUENCE_LEN
from outrider.wire.v1 import inference_pb2 as pb


def _prompt_info_to_pb(info: PromptInfo) -> pb.PromptInfo:
    return pb.PromptInfo(
        request_id=info.request_id,
        prompt_tokens=info.prompt_tokens,
        model=info.model,
        prompt_token_ids=info.prompt_token_ids,
    )


def _prompt_info_from_pb(message: pb.PromptInfo) -> PromptInfo:
    return PromptInfo(
        request_id=RequestId(check_text(message.request_id, "request_id")),
        prompt_tokens=message.prompt_tokens,
        model=check_text(message.model, "model", empty=True),
        prompt_token_ids=check_token_ids(
            message.prompt_token_ids, "prompt_token_ids", high=MAX_SEQUENCE_LEN
        ),
    )


def _delta_to_pb(delta: Delta) -> pb.Delta:
    message = pb.Delta(
        text=delta.text,
        token_ids=delta.token_ids,
        reasoning=delta.reasoning,
        tool_calls=[_call_delta_to_pb(call) for call in delta.tool_calls],
        characters=delta.characters,
    )
    for entry in delta.logprobs:
        message.logprobs.add(
            logprob=entry.logprob,
            top_token_ids=[token for token, _ in entry.top],
            top_logprobs=[value for _, value in entry.top],
        )
    return message


def _delta_from_pb(message: pb.Delta) -> Delta:
    ids = check_token_ids(message.token_ids, "token_ids", high=MAX_SEQUENCE_LEN)
    if len(message.logprobs) not in (0, len(ids)):
        raise_invalid(f"logprobs must have {len(ids)} entries or none, got {len(message.logprobs)}")
    return Delta(
        text=message.text,
        token_ids=ids,
        logprobs=tuple(_token_logprobs_from_pb(entry) for entry in message.logprobs),
        reasoning=message.reasoning,
        tool_calls=tuple(_call_delta_from_pb(call) for call in message.tool_calls),
        characters=message.characters,
    )


def _call_delta_to_pb(delta: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(
        index=delta.index, call_id=delta.call_id, name=delta.name, arguments=delta.arguments
    )


def _call_delta_from_pb(message: pb.ToolCallDelta) -> ToolCallDelta:
    if message.index > MAX_SEQUENCE_LEN:
        raise_invalid(f"tool_calls.index must be at most {MAX_SEQUENCE_LEN}, got {message.index}")
    return ToolCallDelta(
        index=message.index,
        call_id=check_text(message.call_id, "tool_calls.call_id", empty=True),
        name=check_text(message.name, "tool_calls.name", empty=True),
        arguments=message.arguments,
    )


def _token_logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    ids = check_token_ids(message.top_token_ids, "top_token_ids", high=MAX_TOP_LOGPROBS)
    if len(message.top_logprobs) != len(ids):
        raise_invalid(f"top_logprobs must have {len(ids)} entries, got {len(message.top_logprobs)}")
    values = [check_logprob(value, "top_logprobs") for value in message.top_logprobs]
    return TokenLogprobs(
        check_logprob(message.logprob, "logprob"), tuple(zip(ids, values, strict=True))
    )


def _finish_to_pb(finish: FinishInfo) -> pb.FinishInfo:
    return pb.FinishInfo(
        reason=FINISH_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            reasoning_tokens=finish.usage.reasoning_tokens,
            cached_tokens=finish.usage.cached_tokens,
        ),
        spec_decode_stats=stats_to_pb(finish.stats),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
    )


def _finish_from_pb(message: pb.FinishInfo) -> FinishInfo:
    return FinishInfo(
        reason=require_member(FINISH_REASONS_FROM_PB, message.reason, "finish reason"),
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            reasoning_tokens=message.usage.reasoning_tokens,
            cached_tokens=check_number(
                message.usage.cached_tokens,
                "usage.cached_tokens",
                high=message.usage.prompt_tokens,
            ),
        ),
        stats=stats_from_pb(message.spec_decode_stats),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def event_to_pb(event: StreamEvent) -> pb.GenerateStreamResponse:
    """Encode one message of a stream."""
    match event:
        case Delta():
            return pb.GenerateStreamResponse(delta=_delta_to_pb(event))
        case PromptInfo():
            return pb.GenerateStreamResponse(prompt_info=_prompt_info_to_pb(event))
        case FinishInfo():
            return pb.GenerateStreamResponse(finish_info=_finish_to_pb(event))


def event_from_pb(message: pb.GenerateStreamResponse) -> StreamEvent:
    """Decode one message of a stream."""
    match message.WhichOneof("event"):
        case "delta":
            return _delta_from_pb(message.delta)
        case "prompt_info":
            return _prompt_info_from_pb(message.prompt_info)
        case "finish_info":
            return _finish_from_pb(message.finish_info)
        case _:
            raise_invalid("a stream message must hold prompt_info, delta or finish_info")


def resumed_event_to_pb(event: StreamEvent) -> pb.ResumeStreamResponse:
    """Encode one message of a resumed stream."""
    return pb.ResumeStreamResponse(event=event_to_pb(event))


def resumed_event_from_pb(message: pb.ResumeStreamResponse) -> StreamEvent:
    """Decode one message of a resumed stream."""
    return event_from_pb(message.event)


def result_to_pb(result: GenerateResult) -> pb.GenerateResponse:
    """Encode a complete answer."""
    return pb.GenerateResponse(
        prompt_info=pb.PromptInfo(
            request_id=result.request_id,
            prompt_tokens=result.finish.usage.prompt_tokens,
            model=result.model,
            prompt_token_ids=result.prompt_token_ids,
        ),
        output=_delta_to_pb(
            Delta(
                text=result.text,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                reasoning=result.reasoning,
                tool_calls=tuple(
                    ToolCallDelta(
                        index=index, call_id=call.call_id, name=call.name, arguments=call.arguments
                    )
                    for index, call in enumerate(result.tool_calls)
                ),
            )
        ),
        finish_info=_finish_to_pb(result.finish),
    )


def result_from_pb(message: pb.GenerateResponse) -> GenerateResult:
    """Decode a complete answer."""
    info = _prompt_info_from_pb(message.prompt_info)
    output = _delta_from_pb(message.output)
    return GenerateResult(
        request_id=info.request_id,
        model=info.model,
        text=output.text,
        token_ids=output.token_ids,
        finish=_finish_from_pb(message.finish_info),
        logprobs=output.logprobs,
        prompt_token_ids=info.prompt_token_ids,
        reasoning=output.reasoning,
        tool_calls=join_call_deltas(output.tool_calls),
    )
