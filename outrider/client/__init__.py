"""The Python SDK: `Client` and `AsyncClient` for the router's API. Needs neither torch nor models.

    with Client("127.0.0.1:50050") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        with client.stream([user("Name a colour.")], temperature=0.8) as stream:
            for delta in stream:
                print(delta.text, end="")

A prompt is a text (used as it stands), a sequence of token ids, or a conversation of
`ChatMessage`s (rendered with the model's chat template). Every error is an `OutriderError`.
docs/sdk.md has an example for everything else.

arguments.py               Validation of client arguments other than the options of a request.
async_calls.py             Call helpers of the asynchronous client: channel replacement, retry waits
                           and aborts.
async_client.py            Asynchronous client of a router: `AsyncClient` and `AsyncStream`.
attempts.py                Decides after each failed attempt of a request whether to retry it,
                           resume its stream, or give up.
channels.py                Pool of a client's gRPC channels, which replaces the current channel when
                           its connection breaks.
collected_stream.py        Collects the messages of one response stream.
connection.py              Opens connections to a router, in plain text or over TLS, and builds the
                           metadata of calls.
flags.py                   Argparse types for command-line flags, and groups of flags that several
                           commands share.
options.py                 Request options of the client: `GenerateOptions`, and their translation
                           into a request.
pending_requests.py        Keeps the resumable requests whose answers a client still waits for.
retry.py                   Retry policy of client calls.
rpcs.py                    RPCs of InferenceService with their encoders and decoders, which both
                           clients share.
sync_calls.py              Call helpers of the synchronous client: channel replacement, retry waits
                           and aborts.
sync_client.py             Synchronous client of a router: `Client` and `Stream`.
tools.py                   Tools of a conversation: made from Python functions or from OpenAI's
                           JSON, and their results.
tracing.py                 Trace propagation: makes the spans of a request children of the calling
                           program's span.
"""

from outrider.client.async_client import AsyncClient, AsyncStream
from outrider.client.options import GenerateOptions, PromptLike, assistant, system, user
from outrider.client.retry import RetryPolicy
from outrider.client.sync_client import Client, Stream
from outrider.client.tools import function_tool, tool_result
from outrider.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledRequestError,
    ConnectionLostError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tools import Tool, ToolCall, ToolCallDelta
from outrider.transport.tls import TlsConfig
from outrider.wire.inference import (
    ChatMessage,
    Delta,
    DrafterSummary,
    FinishInfo,
    GenerateResult,
    ModelInfo,
    PromptInfo,
    ServerInfo,
    TokenLogprobs,
    Usage,
    VerifierSummary,
)
from outrider.wire.messages import FinishReason, SpecStats

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "CancelledRequestError",
    "ChatMessage",
    "Client",
    "ConnectionLostError",
    "DeadlineExceededError",
    "Delta",
    "DraftMethod",
    "DrafterSummary",
    "FailedPreconditionError",
    "FinishInfo",
    "FinishReason",
    "GenerateOptions",
    "GenerateResult",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "NotFoundError",
    "OutriderError",
    "PermissionDeniedError",
    "PromptInfo",
    "PromptLike",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Rule",
    "ServerInfo",
    "SpecStats",
    "Stream",
    "TlsConfig",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "VerifierSummary",
    "assistant",
    "function_tool",
    "system",
    "tool_result",
    "user",
]
