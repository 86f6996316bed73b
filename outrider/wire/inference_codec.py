"""The public API's dataclasses to protobuf and back.

`*_from_pb` validate what the other side sent (InvalidMessageError, an InvalidRequestError);
`*_to_pb` turn values that the contract cannot hold into InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.sampling import MAX_BANNED_IDS
from outrider.wire.checks import count, fail, logprob, number, text, token_ids
from outrider.wire.common_codec import (
    FINISH_REASONS,
    FINISH_REASONS_FROM_PB,
    METHODS,
    METHODS_FROM_PB,
    RULES,
    RULES_FROM_PB,
    bias_from_pb,
    bias_to_pb,
    known,
    maybe,
    stats_from_pb,
    stats_to_pb,
    structured_from_pb,
    structured_to_pb,
)
from outrider.wire.inference import (
    MAX_CHAT_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    Prompt,
    PromptInfo,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    StreamEvent,
    StreamPosition,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)
from outrider.wire.limits import MAX_CHARACTERS, MAX_PRIORITY, MAX_SEQUENCE_LEN
from outrider.wire.v1 import inference_pb2 as pb

ValueT = TypeVar("ValueT")


@contextmanager
def _encoding(what: str) -> Generator[None]:
    """Values from a caller that do not fit the contract's types are the caller's error."""
    try:
        yield
    except (TypeError, ValueError, UnicodeError) as error:
        raise InvalidRequestError(f"{what}: {error}", reason="INVALID_REQUEST") from error


def _set(message: Message, name: str, value: ValueT) -> ValueT | None:
    return value if message.HasField(name) else None


def request_to_pb(request: GenerateRequest) -> pb.GenerateRequest:
    """Encode a request; InvalidRequestError if a value does not fit its type."""
    with _encoding("request"):
        message = pb.GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            priority=request.priority,
            resumable=request.resumable,
            top_logprobs=request.top_logprobs,
            structured_output=structured_to_pb(request.structured_output),
        )
        match request.prompt:
            case TextPrompt(text=value):
                message.text = value
            case TokenPrompt(token_ids=ids):
                message.token_ids.CopyFrom(pb.TokenPrompt(token_ids=ids))
            case ChatPrompt(messages=turns):
                message.chat.CopyFrom(
                    pb.ChatPrompt(
                        messages=[
                            pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns
                        ]
                    )
                )
        message.sampling.CopyFrom(_sampling_to_pb(request.sampling))
        message.stopping.CopyFrom(_stopping_to_pb(request.stopping))
        message.speculation.CopyFrom(_speculation_to_pb(request.speculation))
        return message


def request_from_pb(message: pb.GenerateRequest) -> GenerateRequest:
    """Decode a request; ranges of sampling values are checked where defaults are applied."""
    request_id = _set(message, "request_id", message.request_id)
    model = _set(message, "model", message.model)
    asked = _set(message, "top_logprobs", message.top_logprobs)
    return GenerateRequest(
        prompt=_prompt_from_pb(message),
        request_id=None if request_id is None else RequestId(text(request_id, "request_id")),
        model=None if model is None else text(model, "model"),
        sampling=_sampling_from_pb(message.sampling),
        stopping=_stopping_from_pb(message.stopping),
        speculation=_speculation_from_pb(message.speculation),
        priority=number(message.priority, "priority", low=-MAX_PRIORITY, high=MAX_PRIORITY),
        resumable=message.resumable,
        top_logprobs=(
            None if asked is None else number(asked, "top_logprobs", high=MAX_TOP_LOGPROBS)
        ),
        structured_output=structured_from_pb(message),
    )


def _prompt_from_pb(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text(message.text, "text", limit=MAX_PROMPT_BYTES))
        case "token_ids":
            ids = token_ids(message.token_ids.token_ids, "token_ids", high=MAX_PROMPT_TOKENS)
            if not ids:
                fail("token_ids must not be empty")
            return TokenPrompt(ids)
        case "chat":
            turns = message.chat.messages
            count(turns, "chat.messages", high=MAX_CHAT_MESSAGES)
            if not turns:
                fail("chat.messages must not be empty")
            return ChatPrompt(
                tuple(
                    ChatMessage(
                        role=text(turn.role, "role", limit=MAX_NAME_BYTES),
                        content=text(turn.content, "content", limit=MAX_PROMPT_BYTES, empty=True),
                    )
                    for turn in turns
                )
            )
        case _:
            fail("prompt must be one of text, token_ids and chat")


def _sampling_to_pb(options: SamplingOptions) -> pb.SamplingOptions:
    return pb.SamplingOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        rule=None if options.rule is None else RULES[options.rule],
        banned_token_ids=options.banned_token_ids,
        logit_bias=bias_to_pb(options.logit_bias),
    )


def _sampling_from_pb(message: pb.SamplingOptions) -> SamplingOptions:
    return SamplingOptions(
        temperature=_set(message, "temperature", message.temperature),
        top_p=_set(message, "top_p", message.top_p),
        top_k=_set(message, "top_k", message.top_k),
        min_p=_set(message, "min_p", message.min_p),
        repetition_penalty=_set(message, "repetition_penalty", message.repetition_penalty),
        presence_penalty=_set(message, "presence_penalty", message.presence_penalty),
        frequency_penalty=_set(message, "frequency_penalty", message.frequency_penalty),
        seed=_set(message, "seed", message.seed),
        rule=maybe(RULES_FROM_PB, message.rule, "rule"),
        banned_token_ids=token_ids(
            message.banned_token_ids, "banned_token_ids", high=MAX_BANNED_IDS
        ),
        logit_bias=bias_from_pb(message.logit_bias),
    )


def _stopping_to_pb(options: StoppingOptions) -> pb.StoppingOptions:
    message = pb.StoppingOptions(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
    )
    if options.ignore_eos is not None:
        message.ignore_eos = options.ignore_eos
    return message


def _stopping_from_pb(message: pb.StoppingOptions) -> StoppingOptions:
    count(message.stop, "stop", high=MAX_STOP_STRINGS)
    for name, value in (("max_tokens", message.max_tokens), ("min_tokens", message.min_tokens)):
        if value > MAX_SEQUENCE_LEN:
            fail(f"{name} must be at most {MAX_SEQUENCE_LEN}, got {value}")
    return StoppingOptions(
        max_tokens=_set(message, "max_tokens", message.max_tokens),
        min_tokens=_set(message, "min_tokens", message.min_tokens),
        stop=tuple(text(stop, "stop", limit=MAX_STOP_STRING_BYTES) for stop in message.stop),
        stop_token_ids=token_ids(message.stop_token_ids, "stop_token_ids", high=MAX_STOP_TOKEN_IDS),
        ignore_eos=_set(message, "ignore_eos", message.ignore_eos),
    )


def _speculation_to_pb(options: SpeculationOptions) -> pb.SpeculationOptions:
    message = pb.SpeculationOptions(
        method=None if options.method is None else METHODS[options.method],
        draft_tokens=options.draft_tokens,
        draft_top_k=options.draft_top_k,
        look_ahead=options.look_ahead,
        fan_out=options.fan_out,
    )
    if options.enabled is not None:
        message.enabled = options.enabled
    return message


def _speculation_from_pb(message: pb.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        enabled=_set(message, "enabled", message.enabled),
        method=maybe(METHODS_FROM_PB, message.method, "method"),
        draft_tokens=_set(message, "draft_tokens", message.draft_tokens),
        draft_top_k=_set(message, "draft_top_k", message.draft_top_k),
        look_ahead=_set(message, "look_ahead", message.look_ahead),
        fan_out=_set(message, "fan_out", message.fan_out),
    )


def _prompt_info_to_pb(info: PromptInfo) -> pb.PromptInfo:
    return pb.PromptInfo(
        request_id=info.request_id, prompt_tokens=info.prompt_tokens, model=info.model
    )


def _prompt_info_from_pb(message: pb.PromptInfo) -> PromptInfo:
    return PromptInfo(
        request_id=RequestId(text(message.request_id, "request_id")),
        prompt_tokens=message.prompt_tokens,
        model=text(message.model, "model", empty=True),
    )


def _delta_to_pb(delta: Delta) -> pb.Delta:
    message = pb.Delta(text=delta.text, token_ids=delta.token_ids)
    for entry in delta.logprobs:
        message.logprobs.add(
            logprob=entry.logprob,
            top_token_ids=[token for token, _ in entry.top],
            top_logprobs=[value for _, value in entry.top],
        )
    return message


def _delta_from_pb(message: pb.Delta) -> Delta:
    ids = token_ids(message.token_ids, "token_ids", high=MAX_SEQUENCE_LEN)
    if len(message.logprobs) not in (0, len(ids)):
        fail(f"logprobs must have {len(ids)} entries or none, got {len(message.logprobs)}")
    return Delta(
        text=message.text,
        token_ids=ids,
        logprobs=tuple(_token_logprobs_from_pb(entry) for entry in message.logprobs),
    )


def _token_logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    ids = token_ids(message.top_token_ids, "top_token_ids", high=MAX_TOP_LOGPROBS)
    if len(message.top_logprobs) != len(ids):
        fail(f"top_logprobs must have {len(ids)} entries, got {len(message.top_logprobs)}")
    values = [logprob(value, "top_logprobs") for value in message.top_logprobs]
    return TokenLogprobs(logprob(message.logprob, "logprob"), tuple(zip(ids, values, strict=True)))


def _finish_to_pb(finish: FinishInfo) -> pb.FinishInfo:
    return pb.FinishInfo(
        reason=FINISH_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
        ),
        spec_decode_stats=stats_to_pb(finish.stats),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
    )


def _finish_from_pb(message: pb.FinishInfo) -> FinishInfo:
    return FinishInfo(
        reason=known(FINISH_REASONS_FROM_PB, message.reason, "finish reason"),
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
        ),
        stats=stats_from_pb(message.spec_decode_stats),
        stop_string=_set(message, "stop_string", message.stop_string),
        stop_token_id=_set(message, "stop_token_id", message.stop_token_id),
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
            fail("a stream message must hold prompt_info, delta or finish_info")


def stream_request_to_pb(request: GenerateRequest) -> pb.GenerateStreamRequest:
    """Encode a streaming request."""
    return pb.GenerateStreamRequest(request=request_to_pb(request))


def stream_request_from_pb(message: pb.GenerateStreamRequest) -> GenerateRequest:
    """Decode a streaming request."""
    return request_from_pb(message.request)


def position_to_pb(position: StreamPosition) -> pb.ResumeStreamRequest:
    """Encode where to go on with a stream."""
    with _encoding("position"):
        return pb.ResumeStreamRequest(
            request_id=position.request_id,
            tokens=position.tokens,
            characters=position.characters,
        )


def position_from_pb(message: pb.ResumeStreamRequest) -> StreamPosition:
    """Decode where to go on with a stream."""
    return StreamPosition(
        request_id=RequestId(text(message.request_id, "request_id")),
        tokens=number(message.tokens, "tokens", high=MAX_SEQUENCE_LEN),
        characters=number(message.characters, "characters", high=MAX_CHARACTERS),
    )


def resumed_event_to_pb(event: StreamEvent) -> pb.ResumeStreamResponse:
    """Encode one message of a stream that goes on."""
    return pb.ResumeStreamResponse(event=event_to_pb(event))


def resumed_event_from_pb(message: pb.ResumeStreamResponse) -> StreamEvent:
    """Decode one message of a stream that goes on."""
    return event_from_pb(message.event)


def result_to_pb(result: GenerateResult) -> pb.GenerateResponse:
    """Encode a complete answer."""
    return pb.GenerateResponse(
        prompt_info=pb.PromptInfo(
            request_id=result.request_id,
            prompt_tokens=result.finish.usage.prompt_tokens,
            model=result.model,
        ),
        output=_delta_to_pb(
            Delta(text=result.text, token_ids=result.token_ids, logprobs=result.logprobs)
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
    )
