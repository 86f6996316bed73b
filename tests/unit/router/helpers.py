"""Requests to a router on scripted verifiers, and what must be left of them."""

from __future__ import annotations

from outrider_router.service import RouterService
from outrider_router.waiting import Ticket

from outrider.ids import RequestId
from outrider.wire.inference import GenerateRequest, StoppingOptions, StreamEvent, TextPrompt
from tests.fakes.router import eventually
from tests.fakes.verifier import FakeVerifier


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
    await eventually(lambda: not verifier.live)
    assert len(service.journal) == 0
    assert service.admission.running == service.admission.waiting == 0
    assert service.admission.reserved_tokens == service.admission.guests == 0


async def collect(service: RouterService, request: GenerateRequest) -> list[StreamEvent]:
    return [event async for event in service.stream(request)]


def ticket(number: int, kv_tokens: int = 10, **changes: object) -> Ticket:
    """A ticket; what is not said is the least."""
    return Ticket(
        request_id=RequestId(f"r{number}"),
        kv_tokens=kv_tokens,
        sequence=number,
        **changes,  # type: ignore[arg-type]
    )
