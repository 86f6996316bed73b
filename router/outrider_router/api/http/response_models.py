"""Pydantic models of HTTP responses, for the published OpenAPI schema only.

`outrider_router.api.http.response_writers` builds the JSON of generation responses without these
models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BaseModel, Field

Count = Annotated[int, Ge(0)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str = Field(description="Stable, machine-readable name of the reason.")


class ErrorResponse(BaseModel):
    """Body of every error response, and of an error event in a stream."""

    error: ErrorBody


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens whose KV was in the prefix cache."""

    cached_tokens: Count


class CompletionTokensDetails(BaseModel):
    """Numbers of draft tokens that were accepted and rejected, and of tokens of the reasoning."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count
    reasoning_tokens: Count


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculationBody(BaseModel):
    """Speculative decoding statistics of this request."""

    mean_acceptance_length: float = Field(
        description="1 + accepted draft tokens / rounds with a proposal."
    )
    draft_acceptance_rate: float = Field(description="Accepted draft tokens / all draft tokens.")
    num_spec_steps: Count = Field(description="Number of rounds with a proposal.")
    num_draft_tokens: Count
    num_accepted_draft_tokens: Count
    acceptance_histogram: list[Count] = Field(
        description="Number of rounds with a proposal by the number of accepted draft tokens, from "
        "0. The counts sum to num_spec_steps."
    )
    accepted_per_position: list[Count]
    rounds: Count = Field(description="Number of all verify rounds that emitted tokens.")
    tokens_per_round: float
    fallback_rounds: Count = Field(
        description="Number of rounds without a proposal although the request uses speculation."
    )
    paused_rounds: Count = Field(
        description="Number of rounds without drafts because the planner turned speculation off."
    )


class MetricsBody(BaseModel):
    """Statistics of a request other than its token counts."""

    speculative_decoding: SpeculationBody


class GenerationResponse(BaseModel):
    """Fields that completions and chat responses share."""

    id: str
    created: int
    model: str
    usage: UsageBody
    metrics: MetricsBody


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(BaseModel):
    """One completion of one prompt."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(
        description="The stop string or stop token id of the request that ended the choice."
    )
    token_ids: list[Count] | None = Field(
        default=None, description="Generated token ids. Present with `return_token_ids`."
    )
    prompt_token_ids: list[Count] | None = Field(
        default=None, description="Token ids of the prompt. Present with `return_token_ids`."
    )


class CompletionResponse(GenerationResponse):
    """Response of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatToken(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Count]


class ChatTokenWithTop(ChatToken):
    """An emitted token and the most probable tokens at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat message's tokens."""

    content: list[ChatTokenWithTop]
    refusal: None


class FunctionCallBody(BaseModel):
    """Function of a tool call."""

    name: str
    arguments: str = Field(description="Arguments as the text of a JSON object.")


class ToolCallBody(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCallBody


class ChatMessageBody(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="Text; null if the message has only tool calls.")
    refusal: None
    reasoning_content: str | None = Field(default=None, description="Reasoning, if there is any.")
    reasoning: str | None = Field(default=None, description="Same as `reasoning_content`.")
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(BaseModel):
    """One choice of a chat response."""

    index: Count
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = Field(
        description="The stop string or stop token id of the request that ended the choice."
    )
    token_ids: list[Count] | None = Field(
        default=None, description="Generated token ids. Present with `return_token_ids`."
    )


class ChatCompletionResponse(GenerationResponse):
    """Response of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[Count] | None = Field(
        default=None, description="Token ids of the prompt. Present with `return_token_ids`."
    )


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    root: str
    parent: str | None = None
    max_model_len: Count = Field(
        description="Largest number of tokens of prompt and answer together."
    )


class ModelList(BaseModel):
    """Response of GET /v1/models. The list is empty while no verifier is healthy."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthResponse(BaseModel):
    """Whether requests can be served now."""

    status: Literal["ok", "unavailable"]


class VersionResponse(BaseModel):
    """Response of GET /version."""

    version: str


class TokenizeResponse(BaseModel):
    """Response of POST /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Response of POST /detokenize."""

    prompt: str


_SAYS = {
    400: "The request is malformed or uses an unsupported feature.",
    401: "The request has no valid API key.",
    404: "The model is not served, or there is no such object.",
    405: "The method is not allowed.",
    409: "A request with this X-Request-Id is running.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON, or the body is compressed.",
    429: "A limit was reached. Retry-After gives the time to wait before a retry.",
    499: "The request was aborted by its request id.",
    500: "An internal error or incompatible processes.",
    503: "No verifier can serve the request now, or the router is shutting down.",
    504: "The deadline of the request passed.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of an operation for the OpenAPI description: those of every
    operation and those with `statuses`.
    """
    return {
        status: {"model": ErrorResponse, "description": _SAYS[status]}
        for status in (400, 401, 405, 413, 415, 429, 500, *statuses)
    }


GENERATION_ERRORS = error_responses(404, 409, 499, 503, 504)
"""Error responses of the generation routes."""
STREAM_RESPONSE: dict[str, Any] = {
    "description": "The answer. With `stream`, server-sent events that end with `[DONE]`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
