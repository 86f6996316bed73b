"""Requests to a router on scripted verifiers, and what must be left of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_router.admission.policy import AdmissionRequest
from outrider_router.requests.service import RouterService

from outrider.ids import RequestId
from outrider.wire.inference import GenerateRequest, StoppingOptions, StreamEvent, TextPrompt
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.waiting import until


def text_request(
    text: str = "abc", *, max_tokens: int | None = 6, **more: object
) -> GenerateRequest:
    return GenerateRequest(
        prompt=TextPrompt(text),
        stopping=StoppingOptions(max_tokens=max_tokens),
        **more,  # type: ignore[arg-type]
    )


async def assert_all_freed(service: RouterService, verifier: FakeVerifier) -> None:
    """The router holds nothing, and the verifier nothing that it has not been told to free."""
    await until(lambda: not verifier.live)
    assert len(service.running_requests) == 0
    assert service.admission.num_running == service.admission.num_waiting == 0
    assert service.admission.reserved_tokens == service.admission.num_entries == 0


async def collect(service: RouterService, request: GenerateRequest) -> list[StreamEvent]:
    return [event async for event in service.stream(request)]


@dataclass
class Pair:
    """A router on two verifiers."""

    router: RouterService
    first: FakeVerifier
    second: FakeVerifier

    async def up(self, verifier: FakeVerifier) -> None:
        """Wait until the router places sessions on a verifier."""
        name = (await verifier.info()).verifier_id
        await until(lambda: sample(self.router, "outrider_verifier_up", verifier=name) == 1)

    async def freed(self) -> None:
        for verifier in (self.first, self.second):
            await assert_all_freed(self.router, verifier)


@asynccontextmanager
async def pair(directory: Path, **config: Any) -> AsyncGenerator[Pair]:
    """Sessions go to the first one while it is there."""
    first, second = FakeVerifier(round_s=0.002), FakeVerifier(round_s=0.002)
    second.change_info(verifier_id="v1")
    async with running_router(directory, {"a": first, "b": second}, **config) as router:
        both = Pair(router, first, second)
        await both.up(first)
        await both.up(second)
        yield both


async def emitted(router: RouterService, count: int) -> None:
    """Wait until the one running request has emitted so many tokens."""
    await until(
        lambda: any(len(entry.output.token_ids) >= count for entry in router.running_requests)
    )


def ticket(number: int, kv_tokens: int = 10, **changes: object) -> AdmissionRequest:
    """A ticket; what is not said is the least."""
    return AdmissionRequest(
        request_id=RequestId(f"r{number}"),
        kv_tokens=kv_tokens,
        sequence=number,
        **changes,  # type: ignore[arg-type]
    )
