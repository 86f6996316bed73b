"""The Python SDK: `Client` and `AsyncClient` for the router's API. Needs neither torch nor models.

    with Client("127.0.0.1:50050") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        with client.stream([user("Name a colour.")], temperature=0.8) as stream:
            for delta in stream:
                print(delta.text, end="")

A prompt is a text (used as it stands), a sequence of token ids, or a conversation of
`ChatMessage`s (rendered with the model's chat template). Every error is an `OutriderError`.
docs/sdk.md has an example for everything else.

arguments.py               Checks of what callers pass to a client beside a request's options.
async_calls.py             Helpers of the asynchronous client.
async_client.py            Asynchronous client.
attempts.py                Retries and resumption of one request.
channels.py                The channel of a client, replaced when its connection breaks.
collected_stream.py        What a stream has received so far.
connection.py              Opens channels to a router.
flags.py                   Types of command-line flags; a ValueError's text is argparse's message,
                           exit status 2.
options.py                 From keyword arguments to a request.
pending_requests.py        Resumable requests whose answers are awaited.
retry.py                   When a call is tried again.
rpcs.py                    RPC definitions shared by both clients.
sync_calls.py              Helpers of the synchronous client.
sync_client.py             Synchronous client.
tracing.py                 The caller's trace.
"""

from outrider.client.async_client import AsyncClient, AsyncStream
from outrider.client.options import GenerateOptions, PromptLike, assistant, system, user
from outrider.client.retry import RetryPolicy
from outrider.client.sync_client import Client, Stream
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
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "VerifierSummary",
    "assistant",
    "system",
    "user",
]
