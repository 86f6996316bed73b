"""Pydantic models of responses, for the published OpenAPI schema only.

`outrider_router.api.http.responses.events` builds the JSON of responses without these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field

from outrider_router.api.http.response_models import Count, MetricsBody

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextBody(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class InputTextBody(BaseModel):
    """Text of a message or of a function's output."""

    type: Literal["input_text"]
    text: str


class ReasoningTextBody(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItemBody(BaseModel):
    """A message. Only those of the assistant are output."""

    type: Literal["message"]
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Annotated[OutputTextBody | InputTextBody, Discriminator("type")]]
    status: ItemStatus


class ReasoningItemBody(BaseModel):
    """Reasoning."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[ReasoningTextBody]
    status: ItemStatus


class FunctionCallItemBody(BaseModel):
    """A function call."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str = Field(description="Arguments as the text of a JSON object.")
    status: ItemStatus


class FunctionOutputItemBody(BaseModel):
    """The output of a function that the model called."""

    type: Literal["function_call_output"]
    id: str
    call_id: str
    output: str | list[InputTextBody]
    status: ItemStatus


class InputTokensDetails(BaseModel):
    """Number of input tokens that were in the prefix cache or were added to it."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputTokensDetails(BaseModel):
    """Number of output tokens of the reasoning."""

    reasoning_tokens: Count


class ResponseUsageBody(BaseModel):
    """Token counts of a response."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseErrorBody(BaseModel):
    """Error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: ResponseStatus
    background: bool
    error: ResponseErrorBody | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[
        Annotated[MessageItemBody | ReasoningItemBody | FunctionCallItemBody, Discriminator("type")]
    ]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsageBody | None
    metrics: MetricsBody | None = Field(
        default=None, description="Present if the response is completed or incomplete."
    )


class ItemList(BaseModel):
    """A page of input items."""

    object: Literal["list"]
    data: list[
        Annotated[
            MessageItemBody | ReasoningItemBody | FunctionCallItemBody | FunctionOutputItemBody,
            Discriminator("type"),
        ]
    ]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Result of deleting a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
