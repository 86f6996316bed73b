"""Pydantic models of the body of POST /v1/responses, with the field names of OpenAI and vLLM.

Items, parts, tools and tool choices of types that are not supported are read as
`UnsupportedObject`, so that they can be refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Le, Len
from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from outrider.spec.tools import MAX_TOOLS
from outrider.wire.inference import MAX_CHAT_MESSAGES, MAX_NAME_BYTES, MAX_PROMPT_BYTES
from outrider.wire.limits import MAX_SEQUENCE_LEN
from outrider_router.api.http.request_models import (
    FunctionDefinition,
    GenerationOptions,
    ModelOrUserName,
    few_entries,
    list_size,
    text_or_list,
)
from outrider_router.api.http.structured_outputs import StrictModel
from outrider_router.api.http.validation_errors import UNION_TAG

MAX_PARTS: Final = 1024
"""Largest number of parts of one item."""
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
_OTHER: Final = f"{UNION_TAG}other"

ItemText = Annotated[str, Len(0, MAX_PROMPT_BYTES)]
ItemId = Annotated[str, Len(1, MAX_NAME_BYTES)]


class UnsupportedObject(StrictModel):
    """An object of a type that is not supported."""

    type: str


def _types(names: Iterable[str], untyped: str = "") -> Callable[[object], str]:
    """Return the function that chooses the member of a union by the type of an object, for members
    that are tagged with the names of their types. Objects without a type are of the type
    `untyped`, by default the first one."""
    tags = {name: f"{UNION_TAG}{name}" for name in names}
    default = tags[untyped or next(iter(tags))]

    def tag_of(value: object) -> str:
        type_ = value.get("type") if isinstance(value, dict) else None
        return tags.get(type_, _OTHER) if isinstance(type_, str) else default

    return tag_of


class InputTextPart(StrictModel):
    """A text part of a message or of a function's output."""

    type: Literal["input_text"]
    text: ItemText


class OutputTextPart(StrictModel):
    """A text part of an earlier answer."""

    type: Literal["output_text"]
    text: ItemText


class ReasoningTextPart(StrictModel):
    """A part of the reasoning of an earlier answer."""

    type: Literal["reasoning_text"]
    text: ItemText


_Unsupported = Annotated[SkipJsonSchema[UnsupportedObject], Tag(_OTHER)]
MessagePart = Annotated[
    Annotated[InputTextPart, Tag(f"{UNION_TAG}input_text")]
    | Annotated[OutputTextPart, Tag(f"{UNION_TAG}output_text")]
    | _Unsupported,
    Discriminator(_types(("input_text", "output_text"))),
]
OutputPart = Annotated[
    Annotated[InputTextPart, Tag(f"{UNION_TAG}input_text")] | _Unsupported,
    Discriminator(_types(("input_text",))),
]


class InputMessage(StrictModel):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[ItemText, Tag(f"{UNION_TAG}text")]
        | Annotated[Annotated[list[MessagePart], list_size(1, MAX_PARTS)], Tag(f"{UNION_TAG}list")],
        Discriminator(text_or_list),
    ]
    id: ItemId | None = None


class InputFunctionCall(StrictModel):
    """A function call that the model made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ModelOrUserName
    arguments: ItemText = Field(description="Arguments as the text of a JSON object.")
    id: ItemId | None = None


class InputFunctionOutput(StrictModel):
    """The output of a function that the model called."""

    type: Literal["function_call_output"]
    call_id: ItemId = Field(description="`call_id` of an earlier function_call.")
    output: Annotated[
        Annotated[ItemText, Tag(f"{UNION_TAG}text")]
        | Annotated[Annotated[list[OutputPart], list_size(1, MAX_PARTS)], Tag(f"{UNION_TAG}list")],
        Discriminator(text_or_list),
    ]
    id: ItemId | None = None


class InputReasoning(StrictModel):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningTextPart], list_size(0, MAX_PARTS)] | None = None
    id: ItemId | None = None


class InputReference(StrictModel):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


ITEM_TYPES: Final = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
)
"""Types of input items that are supported."""
_typed_item, _untyped_reference = _types(ITEM_TYPES), _types(ITEM_TYPES, "item_reference")


def _item_kind(value: object) -> str:
    """Return the tag of an input item. Messages and references may have no type."""
    is_reference = isinstance(value, dict) and "id" in value and "role" not in value
    return _untyped_reference(value) if is_reference else _typed_item(value)


InputItem = Annotated[
    Annotated[InputMessage, Tag(f"{UNION_TAG}message")]
    | Annotated[InputFunctionCall, Tag(f"{UNION_TAG}function_call")]
    | Annotated[InputFunctionOutput, Tag(f"{UNION_TAG}function_call_output")]
    | Annotated[InputReasoning, Tag(f"{UNION_TAG}reasoning")]
    | Annotated[InputReference, Tag(f"{UNION_TAG}item_reference")]
    | _Unsupported,
    Discriminator(_item_kind),
]


class ResponseFunctionTool(FunctionDefinition):
    """Function among the tools of a response."""

    type: Literal["function"]


_FUNCTION: Final = f"{UNION_TAG}function"
_typed_function = _types(("function",))
ResponseToolDefinition = Annotated[
    Annotated[ResponseFunctionTool, Tag(_FUNCTION)] | _Unsupported,
    Discriminator(_typed_function),
]


class NamedFunctionChoice(StrictModel):
    """Choice of the function that must be called."""

    type: Literal["function"]
    name: str


def _choice_kind(value: object) -> str:
    return f"{UNION_TAG}text" if isinstance(value, str) else _typed_function(value)


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"{UNION_TAG}text")]
    | Annotated[NamedFunctionChoice, Tag(_FUNCTION)]
    | _Unsupported,
    Discriminator(_choice_kind),
]


class PlainTextFormat(StrictModel):
    """Format of text, or of any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(StrictModel):
    """Format of JSON that fits a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Len(1, MAX_NAME_BYTES)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: ItemText | None = None
    strict: bool | None = Field(default=None, description="It is always kept to the letter.")


_PLAIN, _SCHEMA = f"{UNION_TAG}plain", f"{UNION_TAG}schema"


def _format_kind(value: object) -> str:
    is_schema = isinstance(value, dict) and value.get("type") == "json_schema"
    return _SCHEMA if is_schema else _PLAIN


class ResponseTextOptions(StrictModel):
    """Options of the text of a response."""

    format: (
        Annotated[
            Annotated[PlainTextFormat, Tag(_PLAIN)] | Annotated[JsonSchemaFormat, Tag(_SCHEMA)],
            Discriminator(_format_kind),
        ]
        | None
    ) = None


class ReasoningOptions(StrictModel):
    """Options of the reasoning of a response."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="Same as `reasoning_effort` of chats."
    )


class ResponseStreamOptions(StrictModel):
    """Options of a stream of a response."""

    include_obfuscation: bool | None = Field(
        default=None, description="It is accepted; events are never obfuscated."
    )


Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include` in OpenAI's API."""


class CreateResponseRequest(GenerationOptions):
    """Body of POST /v1/responses."""

    input: Annotated[
        Annotated[Annotated[str, Len(0, MAX_PROMPT_BYTES)], Tag(f"{UNION_TAG}text")]
        | Annotated[
            Annotated[list[InputItem], list_size(1, MAX_CHAT_MESSAGES)], Tag(f"{UNION_TAG}list")
        ],
        Discriminator(text_or_list),
    ]
    instructions: ItemText | None = Field(
        default=None, description="System message before all items. It is not carried over."
    )
    previous_response_id: ItemId | None = Field(
        default=None, description="Id of a stored response, whose conversation is continued."
    )
    store: bool | None = Field(
        default=None,
        description="Whether the response is stored. The default is true if the router stores "
        "responses.",
    )
    background: bool | None = Field(
        default=None, description="Whether the response is made without the client."
    )
    metadata: (
        Annotated[
            dict[
                Annotated[str, Len(0, MAX_METADATA_KEY_CHARS)],
                Annotated[str, Len(0, MAX_METADATA_VALUE_CHARS)],
            ],
            Len(0, MAX_METADATA_PAIRS),
            BeforeValidator(partial(few_entries, most=MAX_METADATA_PAIRS)),
        ]
        | None
    ) = Field(default=None, description="Pairs of texts that the response repeats.")
    max_output_tokens: Annotated[int, Ge(1), Le(MAX_SEQUENCE_LEN)] | None = None
    tools: Annotated[list[ResponseToolDefinition], list_size(0, MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: ResponseToolChoice | None = Field(
        default=None, description="As in chats, but a named function is `{type, name}`."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may have several calls. The default is true."
    )
    text: ResponseTextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Includable], list_size(0, 16)] | None = Field(
        default=None, description="Further data of the answer. Log-probabilities are refused."
    )
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as `enable_thinking`."
    )
