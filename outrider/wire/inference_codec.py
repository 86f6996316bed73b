"""Codec of the public API's requests; `inference_response_codec` has the answers.

The functions `*_from_pb` raise InvalidMessageError, a subclass of InvalidRequestError, for invalid
messages. The functions `*_to_pb` raise InvalidRequestError for values that do not fit their
protobuf fields.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.sampling import MAX_BANNED_IDS
from outrider.spec.thinking_budget import MAX_THINKING_TOKENS
from outrider.spec.token_limits import MAX_ALLOWED_IDS
from outrider.spec.tools import (
    MAX_TEMPLATE_VARIABLES_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoiceMode,
    ToolOptions,
)
from outrider.wire.checks import (
    check_count,
    check_number,
    check_text,
    check_token_ids,
    quote_value,
    raise_invalid,
)
from outrider.wire.common_codec import (
    METHODS,
    METHODS_FROM_PB,
    RULES,
    RULES_FROM_PB,
    bias_from_pb,
    bias_to_pb,
    optional_member,
    structured_from_pb,
    structured_to_pb,
)
from outrider.wire.inference import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORD_TEXTS,
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
    GenerateRequest,
    Prompt,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    StreamPosition,
    TextPrompt,
    TokenPrompt,
)
from outrider.wire.limits import MAX_CHARACTERS, MAX_PRIORITY, MAX_SEQUENCE_LEN
from outrider.wire.v1 import inference_pb2 as pb

ValueT = TypeVar("ValueT")
MessageT = TypeVar("MessageT", bound=Message)

_UNFIT: Final = (TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions that protobuf raises for values that do not fit a field. UnicodeError is a
ValueError.
"""
_WANTED: Final = {
    FieldDescriptor.TYPE_UINT32: "an integer in [0, 2^32)",
    FieldDescriptor.TYPE_FIXED64: "an integer in [0, 2^64)",
    FieldDescriptor.TYPE_SINT32: "an integer in [-2^31, 2^31)",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "a text",
}
"""Descriptions of the values that protobuf field types accept."""


_MODES: Final[dict[ToolChoiceMode, pb.ToolChoiceMode]] = {
    ToolChoiceMode.AUTO: pb.TOOL_CHOICE_MODE_AUTO,
    ToolChoiceMode.NONE: pb.TOOL_CHOICE_MODE_NONE,
    ToolChoiceMode.REQUIRED: pb.TOOL_CHOICE_MODE_REQUIRED,
    ToolChoiceMode.NAMED: pb.TOOL_CHOICE_MODE_NAMED,
}
_MODES_FROM_PB: Final[dict[int, ToolChoiceMode]] = {value: mode for mode, value in _MODES.items()}


@contextmanager
def _encoding(what: str) -> Generator[None]:
    """Convert exceptions for values that do not fit a field into InvalidRequestError."""
    try:
        yield
    except _UNFIT as error:
        raise InvalidRequestError(f"{what}: {error}", reason="INVALID_REQUEST") from error


def _made(kind: type[MessageT], **values: Any) -> MessageT:
    """Return a message with these fields. Raises InvalidRequestError if a value does not fit, and
    names its field.
    """
    try:
        return kind(**values)
    except _UNFIT:
        for name, value in values.items():
            _check_field(kind, name, value)
        raise


def _check_field(kind: type[Message], name: str, value: object) -> None:
    try:
        kind(**{name: value})
    except _UNFIT as error:
        field = kind.DESCRIPTOR.fields_by_name[name]
        wanted = _WANTED.get(field.type, "of another type")
        each = "each be " if isinstance(value, tuple) else "be "
        raise InvalidRequestError(
            f"{name} must {each}{wanted}, got {quote_value(value)}",
            reason="INVALID_REQUEST",
        ) from error


def _set(message: Message, name: str, value: ValueT) -> ValueT | None:
    return value if message.HasField(name) else None


def request_to_pb(request: GenerateRequest) -> pb.GenerateRequest:
    """Encode a request. Raises InvalidRequestError if a value does not fit its type."""
    with _encoding("request"):
        message = _made(
            pb.GenerateRequest,
            request_id=request.request_id,
            model=request.model,
            priority=request.priority,
            resumable=request.resumable,
            top_logprobs=request.top_logprobs,
            structured_output=structured_to_pb(request.structured_output),
            skip_special_tokens=request.skip_special_tokens,
            return_prompt_token_ids=request.return_prompt_token_ids,
        )
        match request.prompt:
            case TextPrompt(text=value):
                message.text = _made(pb.GenerateRequest, text=value).text
            case TokenPrompt(token_ids=ids):
                message.token_ids.CopyFrom(_made(pb.TokenPrompt, token_ids=ids))
            case ChatPrompt() as chat:
                message.chat.CopyFrom(_chat_to_pb(chat))
        message.sampling.CopyFrom(_sampling_to_pb(request.sampling))
        message.stopping.CopyFrom(_stopping_to_pb(request.stopping))
        message.speculation.CopyFrom(_speculation_to_pb(request.speculation))
        return message


def request_from_pb(message: pb.GenerateRequest) -> GenerateRequest:
    """Decode a request. Ranges of sampling parameters are checked later, when defaults are
    applied.
    """
    request_id = _set(message, "request_id", message.request_id)
    model = _set(message, "model", message.model)
    asked = _set(message, "top_logprobs", message.top_logprobs)
    return GenerateRequest(
        prompt=_prompt_from_pb(message),
        request_id=None if request_id is None else RequestId(check_text(request_id, "request_id")),
        model=None if model is None else check_text(model, "model"),
        sampling=_sampling_from_pb(message.sampling),
        stopping=_stopping_from_pb(message.stopping),
        speculation=_speculation_from_pb(message.speculation),
        priority=check_number(message.priority, "priority", low=-MAX_PRIORITY, high=MAX_PRIORITY),
        resumable=message.resumable,
        top_logprobs=(
            None if asked is None else check_number(asked, "top_logprobs", high=MAX_TOP_LOGPROBS)
        ),
        structured_output=structured_from_pb(message),
        skip_special_tokens=_set(message, "skip_special_tokens", message.skip_special_tokens),
        return_prompt_token_ids=message.return_prompt_token_ids,
    )


def _prompt_from_pb(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(check_text(message.text, "text", limit=MAX_PROMPT_BYTES))
        case "token_ids":
            ids = check_token_ids(message.token_ids.token_ids, "token_ids", high=MAX_PROMPT_TOKENS)
            if not ids:
                raise_invalid("token_ids must not be empty")
            return TokenPrompt(ids)
        case "chat":
            return _chat_from_pb(message.chat)
        case _:
            raise_invalid("prompt must be one of text, token_ids and chat")


def _chat_to_pb(prompt: ChatPrompt) -> pb.ChatPrompt:
    """Encode a conversation. Raises TypeError or ValueError if a value does not fit its field."""
    tools = prompt.tools
    message = pb.ChatPrompt(
        messages=[_message_to_pb(message) for message in prompt.messages],
        tools=map(_tool_to_pb, tools.tools),
        tool_choice=None if tools.choice is ToolChoiceMode.AUTO else _MODES[tools.choice],
        tool_name=tools.named,
        template_variables=prompt.template_variables,
        reasoning_effort=prompt.reasoning_effort,
        thinking_token_budget=prompt.thinking_token_budget,
    )
    if not tools.parallel:
        message.parallel_tool_calls = False
    return message


def _tool_to_pb(tool: Tool) -> pb.Tool:
    message = pb.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
    if tool.strict is not None:
        message.strict = tool.strict
    return message


def _message_to_pb(message: ChatMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            pb.ToolCall(call_id=call.call_id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _chat_from_pb(message: pb.ChatPrompt) -> ChatPrompt:
    """Decode a conversation."""
    check_count(message.messages, "chat.messages", high=MAX_CHAT_MESSAGES)
    check_count(message.tools, "chat.tools", high=MAX_TOOLS)
    if not message.messages:
        raise_invalid("chat.messages must not be empty")
    return ChatPrompt(
        messages=tuple(map(_message_from_pb, message.messages)),
        tools=ToolOptions(
            tools=tuple(map(_tool_from_pb, message.tools)),
            choice=optional_member(_MODES_FROM_PB, message.tool_choice, "chat.tool_choice")
            or ToolChoiceMode.AUTO,
            named=_chat_name(message.tool_name, "chat.tool_name"),
            parallel=message.parallel_tool_calls
            if message.HasField("parallel_tool_calls")
            else True,
        ),
        template_variables=check_text(
            message.template_variables,
            "chat.template_variables",
            limit=MAX_TEMPLATE_VARIABLES_BYTES,
            empty=True,
        ),
        reasoning_effort=check_text(message.reasoning_effort, "chat.reasoning_effort")
        if message.HasField("reasoning_effort")
        else None,
        thinking_token_budget=check_number(
            message.thinking_token_budget, "chat.thinking_token_budget", high=MAX_THINKING_TOKENS
        )
        if message.HasField("thinking_token_budget")
        else None,
    )


def _message_from_pb(message: pb.ChatMessage) -> ChatMessage:
    check_count(message.tool_calls, "tool_calls", high=MAX_TOOL_CALLS)
    return ChatMessage(
        role=check_text(message.role, "role", limit=MAX_NAME_BYTES),
        content=_chat_text(message.content, "content"),
        tool_calls=tuple(
            ToolCall(
                call_id=_chat_name(call.call_id, "tool_calls.call_id"),
                name=check_text(call.name, "tool_calls.name", limit=MAX_NAME_BYTES),
                arguments=_chat_text(call.arguments, "tool_calls.arguments"),
            )
            for call in message.tool_calls
        ),
        tool_call_id=_chat_name(message.tool_call_id, "tool_call_id"),
        name=_chat_name(message.name, "name"),
        reasoning=_chat_text(message.reasoning, "reasoning"),
    )


def _tool_from_pb(message: pb.Tool) -> Tool:
    return Tool(
        name=check_text(message.name, "tools.name", limit=MAX_NAME_BYTES),
        description=_chat_text(message.description, "tools.description"),
        parameters=_chat_text(message.parameters, "tools.parameters"),
        strict=message.strict if message.HasField("strict") else None,
    )


def _chat_text(text: str, field: str) -> str:
    return check_text(text, field, limit=MAX_PROMPT_BYTES, empty=True)


def _chat_name(text: str, field: str) -> str:
    return check_text(text, field, limit=MAX_NAME_BYTES, empty=True)


def _sampling_to_pb(options: SamplingOptions) -> pb.SamplingOptions:
    with _encoding("logit_bias"):
        bias = bias_to_pb(options.logit_bias)
    return _made(
        pb.SamplingOptions,
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
        logit_bias=bias,
        allowed_token_ids=options.allowed_token_ids,
        bad_words=options.bad_words,
    )


def _sampling_from_pb(message: pb.SamplingOptions) -> SamplingOptions:
    check_count(message.bad_words, "bad_words", high=MAX_BAD_WORD_TEXTS)
    return SamplingOptions(
        temperature=_set(message, "temperature", message.temperature),
        top_p=_set(message, "top_p", message.top_p),
        top_k=_set(message, "top_k", message.top_k),
        min_p=_set(message, "min_p", message.min_p),
        repetition_penalty=_set(message, "repetition_penalty", message.repetition_penalty),
        presence_penalty=_set(message, "presence_penalty", message.presence_penalty),
        frequency_penalty=_set(message, "frequency_penalty", message.frequency_penalty),
        seed=_set(message, "seed", message.seed),
        rule=optional_member(RULES_FROM_PB, message.rule, "rule"),
        banned_token_ids=check_token_ids(
            message.banned_token_ids, "banned_token_ids", high=MAX_BANNED_IDS
        ),
        logit_bias=bias_from_pb(message.logit_bias),
        allowed_token_ids=check_token_ids(
            message.allowed_token_ids, "allowed_token_ids", high=MAX_ALLOWED_IDS
        ),
        bad_words=tuple(
            check_text(word, "bad_words", limit=MAX_BAD_WORD_BYTES) for word in message.bad_words
        ),
    )


def _stopping_to_pb(options: StoppingOptions) -> pb.StoppingOptions:
    return _made(
        pb.StoppingOptions,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        include_stop_str_in_output=options.include_stop_str_in_output,
    )


def _stopping_from_pb(message: pb.StoppingOptions) -> StoppingOptions:
    check_count(message.stop, "stop", high=MAX_STOP_STRINGS)
    for name, value in (("max_tokens", message.max_tokens), ("min_tokens", message.min_tokens)):
        if value > MAX_SEQUENCE_LEN:
            raise_invalid(f"{name} must be at most {MAX_SEQUENCE_LEN}, got {value}")
    return StoppingOptions(
        max_tokens=_set(message, "max_tokens", message.max_tokens),
        min_tokens=_set(message, "min_tokens", message.min_tokens),
        stop=tuple(check_text(stop, "stop", limit=MAX_STOP_STRING_BYTES) for stop in message.stop),
        stop_token_ids=check_token_ids(
            message.stop_token_ids, "stop_token_ids", high=MAX_STOP_TOKEN_IDS
        ),
        ignore_eos=_set(message, "ignore_eos", message.ignore_eos),
        include_stop_str_in_output=message.include_stop_str_in_output,
    )


def _speculation_to_pb(options: SpeculationOptions) -> pb.SpeculationOptions:
    return _made(
        pb.SpeculationOptions,
        enabled=options.enabled,
        method=None if options.method is None else METHODS[options.method],
        draft_tokens=options.draft_tokens,
        draft_top_k=options.draft_top_k,
        look_ahead=options.look_ahead,
        fan_out=options.fan_out,
    )


def _speculation_from_pb(message: pb.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        enabled=_set(message, "enabled", message.enabled),
        method=optional_member(METHODS_FROM_PB, message.method, "method"),
        draft_tokens=_set(message, "draft_tokens", message.draft_tokens),
        draft_top_k=_set(message, "draft_top_k", message.draft_top_k),
        look_ahead=_set(message, "look_ahead", message.look_ahead),
        fan_out=_set(message, "fan_out", message.fan_out),
    )


def stream_request_to_pb(request: GenerateRequest) -> pb.GenerateStreamRequest:
    """Encode a streaming request."""
    return pb.GenerateStreamRequest(request=request_to_pb(request))


def stream_request_from_pb(message: pb.GenerateStreamRequest) -> GenerateRequest:
    """Decode a streaming request."""
    return request_from_pb(message.request)


def position_to_pb(position: StreamPosition) -> pb.ResumeStreamRequest:
    """Encode the position from which a stream is resumed."""
    with _encoding("position"):
        return pb.ResumeStreamRequest(
            request_id=position.request_id,
            tokens=position.tokens,
            characters=position.characters,
        )


def position_from_pb(message: pb.ResumeStreamRequest) -> StreamPosition:
    """Decode the position from which a stream is resumed."""
    return StreamPosition(
        request_id=RequestId(check_text(message.request_id, "request_id")),
        tokens=check_number(message.tokens, "tokens", high=MAX_SEQUENCE_LEN),
        characters=check_number(message.characters, "characters", high=MAX_CHARACTERS),
    )
