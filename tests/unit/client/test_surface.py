"""What `outrider.client` exports, and that neither it nor the router needs torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outrider.client
from tests.fakes.missing import without

SURFACE = [
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


def test_the_public_surface_changes_on_purpose_only() -> None:
    assert sorted(outrider.client.__all__) == sorted(SURFACE)
    assert all(hasattr(outrider.client, name) for name in SURFACE)


@pytest.mark.parametrize(
    ("blocked", "modules"),
    [
        (
            {"torch", "transformers", "ray", "opentelemetry"},
            [
                "outrider_router.__main__",
                "outrider_router.api.inference_grpc",
                "outrider.text.tokenizer",
                "outrider.client.commands.main",
                "outrider.client.commands.generate",
                "outrider.client.commands.serve",
            ],
        ),
        (
            {
                "cryptography",
                "fastapi",
                "gguf",
                "jinja2",
                "llguidance",
                "opentelemetry",
                "prometheus_client",
                "safetensors",
                "tokenizers",
                "torch",
            },
            [
                "outrider.client",
                "outrider.client.commands.main",
                "outrider.client.commands.generate",
            ],
        ),
    ],
)
def test_client_and_router_import_without_torch_and_the_client_with_next_to_nothing(
    blocked: set[str], modules: list[str]
) -> None:
    imports = "".join(f"import {module}\n" for module in modules)
    script = without(blocked) + imports
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
