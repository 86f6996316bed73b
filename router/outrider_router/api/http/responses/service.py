"""Serves responses: whole, as a stream and in the background, and stores them.

A response in the background runs in a task of its own. When the router shuts down, it waits for the
requests of these tasks as for all others, and then ends them with an error.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial

from starlette.types import Send

from outrider.errors import (
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    ResourceExhaustedError,
)
from outrider.ids import RequestId, TenantId
from outrider.wire.inference import Delta, FinishInfo, PromptInfo, StreamEvent
from outrider_router.admission.access_control import AccessGrant
from outrider_router.admission.policy import no_verifier_error
from outrider_router.api.http.errors import describe_error
from outrider_router.api.http.event_streams import EventSender, send_events, send_json
from outrider_router.api.http.response_writers import json_quote
from outrider_router.api.http.responses.events import RESPONSE_PREFIX, ResponseOutput, write_events
from outrider_router.api.http.responses.input_items import PREVIOUS, Item, list_items
from outrider_router.api.http.responses.request_models import CreateResponseRequest
from outrider_router.api.http.responses.store import ResponseStore, StoredResponse, Turn
from outrider_router.api.http.responses.translation import (
    TranslatedResponse,
    check_supported,
    response_members,
    translate_response,
)
from outrider_router.base.tenants import Caller
from outrider_router.requests.request import served_model_name
from outrider_router.requests.service import RouterService

MAX_QUOTED_ID_CHARS = 80
BACKGROUND_RETRY_S = 1.0
"""Retry hint in seconds when too many responses run in the background."""
_CONTINUABLE = ("completed", "incomplete")
"""Statuses of responses whose conversation can be continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """Who asks for a response, and by which request."""

    caller: Caller
    request_id: RequestId
    """Id of the HTTP request in logs and headers."""
    client_id: RequestId | None
    """Id of the request if the client chose it."""
    traceparent: str = ""
    """W3C Trace Context that the client sent, or ""."""


@dataclass(slots=True, kw_only=True, eq=False)
class PendingResponse:
    """A response that is being made."""

    response_id: str
    origin: RequestOrigin
    translated: TranslatedResponse
    timeout_s: float | None
    """Time limit of the request in seconds; None is unlimited."""
    turns: tuple[Turn, ...]
    """The conversation up to the input."""
    output: ResponseOutput
    is_stored: bool
    is_background: bool

    def snapshot(self) -> StoredResponse:
        """Return the response as it is now."""
        return StoredResponse(
            response_id=self.response_id,
            tenant=self.origin.caller.tenant,
            body=json_quote(self.output.response).encode(),
            status=self.output.status,
            is_background=self.is_background,
            turns=(*self.turns, Turn(self.output.items)),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _BackgroundRun:
    """A response in the background and its task."""

    pending: PendingResponse
    task: asyncio.Task[str]


class ResponseService:
    """Responses of one router. Those that are stored exist in this router only."""

    def __init__(self, service: RouterService) -> None:
        options = service.config.http_options
        self._service = service
        self._max_background = options.max_background_responses
        self._store: ResponseStore | None = None
        """None if the router stores no responses."""
        if options.max_stored_responses:
            self._store = ResponseStore(
                max_responses=options.max_stored_responses,
                max_bytes=options.max_stored_response_bytes,
                ttl_s=options.stored_response_ttl_s,
                clock=time.monotonic,
            )
        self._background: dict[str, _BackgroundRun] = {}
        """Running responses by their ids. They are added to the store when they have ended."""

    # ---- making responses ----------------------------------------------------------------------

    def prepare(self, body: CreateResponseRequest, origin: RequestOrigin) -> PendingResponse:
        """Check a body and translate it. Raises InvalidRequestError, NotFoundError for ids that are
        not stored, and UnavailableError without a verifier."""
        check_supported(body)
        self._check_storage(body)
        tenant = origin.caller.tenant
        previous: tuple[Turn, ...] = ()
        if body.previous_response_id is not None:
            previous = self._previous_turns(tenant, body.previous_response_id)
        new = Turn(list_items(body.input, _make_id, partial(self._find_item, tenant)))
        info = self._service.registry.any_verifier_info()
        if info is None:
            raise no_verifier_error()
        response_id = _make_id(RESPONSE_PREFIX)
        is_stored = self._store is not None and body.store is not False
        members = response_members(
            body,
            response_id=response_id,
            model=served_model_name(self._service.config, info),
            created_at=int(time.time()),
            is_stored=is_stored,
        )
        return PendingResponse(
            response_id=response_id,
            origin=origin,
            translated=translate_response(body, previous, new, origin.client_id),
            timeout_s=body.timeout_s,
            turns=(*previous, new),
            output=ResponseOutput(members),
            is_stored=is_stored,
            is_background=bool(body.background),
        )

    async def send_whole(self, pending: PendingResponse, send: Send) -> None:
        """Make a response and send it. Raises the errors of the request."""
        await self._serve(pending)
        self._save(pending)
        await send_json(send, json_quote(pending.output.response))

    async def send_stream(self, pending: PendingResponse, send: Send) -> None:
        """Make a response and send its events. Raises errors that occur before the first output."""

        async def serve(write: EventSender) -> str:
            last = await self._serve(pending, write)
            self._save(pending)
            return last

        def fail(error: Exception) -> str:
            events = pending.output.fail(describe_error(error))
            self._save(pending)
            return write_events(events)

        await send_events(self._service, send, serve, fail)

    def start_background(self, pending: PendingResponse) -> StoredResponse:
        """Begin a response in the background, and return it as it is now.

        Raises ResourceExhaustedError if too many run, and the errors of access control.
        """
        self._service.check_accepting()
        if len(self._background) >= self._max_background:
            raise ResourceExhaustedError(
                f"{len(self._background)} responses run in the background, the most that this "
                "router allows (http_options.max_background_responses)",
                reason="BACKGROUND_FULL",
                retry_after_s=BACKGROUND_RETRY_S,
            )
        caller, request = pending.origin.caller, pending.translated.request
        (passed,) = self._service.access_control.enter_requests(caller, (request,))
        task = asyncio.create_task(self._serve(pending, passed=passed), name="response")
        run = _BackgroundRun(pending=pending, task=task)
        self._background[pending.response_id] = run
        task.add_done_callback(partial(self._end_background, run, passed))
        return pending.snapshot()

    async def _serve(
        self,
        pending: PendingResponse,
        write: EventSender | None = None,
        passed: AccessGrant | None = None,
    ) -> str:
        """Make a response. Pass its events to `write`, and return the last ones. Raises the errors
        of the request."""
        output, last = pending.output, ""

        async def take(event: StreamEvent) -> None:
            nonlocal last
            match event:
                case PromptInfo():
                    output.start()
                case Delta():
                    events = output.push_delta(event)
                    if write is not None and events:
                        await write(write_events(events))
                case FinishInfo():
                    events = output.finish(event, completed_at=int(time.time()))
                    last = "" if write is None else write_events(events)

        origin = pending.origin
        try:
            await self._service.serve_request(
                pending.translated.request,
                take,
                timeout_s=pending.timeout_s,
                caller=origin.caller,
                traceparent=origin.traceparent,
                own_id=origin.request_id,
                passed=passed,
            )
        except OutriderError as error:
            renamed = pending.translated.rename_error(error)
            if renamed is error:
                raise
            raise renamed from error
        return last

    def _end_background(
        self, run: _BackgroundRun, passed: AccessGrant, task: asyncio.Task[str]
    ) -> None:
        """Store the response of a background task that has ended, whether it began or not."""
        passed.release()
        pending = run.pending
        error = None if task.cancelled() else task.exception()
        if not pending.output.has_ended:
            if error is None:
                pending.output.cancel()
            else:
                pending.output.fail(describe_error(error))
        del self._background[pending.response_id]
        self._save(pending)

    def _save(self, pending: PendingResponse) -> None:
        """Store a response that has ended."""
        if self._store is not None and pending.is_stored:
            self._store.add_response(pending.snapshot())

    # ---- stored responses ----------------------------------------------------------------------

    def get_response(self, caller: Caller, response_id: str) -> StoredResponse:
        """Return a response that is stored or runs in the background. Raises NotFoundError."""
        run = self._background_run(caller.tenant, response_id)
        if run is not None:
            return run.pending.snapshot()
        stored = None
        if self._store is not None:
            stored = self._store.get_response(caller.tenant, response_id)
        if stored is None:
            raise _no_response(response_id)
        return stored

    async def cancel_response(self, caller: Caller, response_id: str) -> StoredResponse:
        """Cancel a response that runs in the background, and return it. One that has ended is
        returned unchanged. Raises NotFoundError, and InvalidRequestError for other responses."""
        run = self._background_run(caller.tenant, response_id)
        if run is not None:
            run.task.cancel()
            await asyncio.wait((run.task,))
            return run.pending.snapshot()
        stored = self.get_response(caller, response_id)
        if not stored.is_background:
            raise InvalidRequestError(
                "only a response with background: true can be cancelled; the response "
                f"{_quoted(response_id)} was made while its client waited",
                reason="NOT_BACKGROUND",
            )
        return stored

    async def delete_response(self, caller: Caller, response_id: str) -> None:
        """Delete a response. One that runs in the background is cancelled. Raises NotFoundError."""
        if self._background_run(caller.tenant, response_id) is not None:
            await self.cancel_response(caller, response_id)
        if self._store is None or not self._store.delete_response(caller.tenant, response_id):
            raise _no_response(response_id)

    def _background_run(self, tenant: TenantId, response_id: str) -> _BackgroundRun | None:
        run = self._background.get(response_id)
        return run if run is not None and run.pending.origin.caller.tenant == tenant else None

    def _check_storage(self, body: CreateResponseRequest) -> None:
        """Raise InvalidRequestError if a body needs stored responses and there are none."""
        if self._store is None:
            for name, value in (
                (PREVIOUS, body.previous_response_id),
                ("background", body.background),
                ("store", body.store),
            ):
                if value:
                    raise _store_off(name)
        elif body.background and body.store is False:
            raise InvalidRequestError(
                "background needs a stored response, so store may not be false",
                reason="INVALID_REQUEST",
                param="store",
            )

    def _previous_turns(self, tenant: TenantId, response_id: str) -> tuple[Turn, ...]:
        run = self._background_run(tenant, response_id)
        status = ""
        turns: tuple[Turn, ...] = ()
        if run is not None:
            status = run.pending.output.status
        elif self._store is not None:
            stored = self._store.get_response(tenant, response_id)
            if stored is not None:
                status, turns = stored.status, stored.turns
        if not status:
            raise NotFoundError(
                f"the previous response {_quoted(response_id)} is not stored here; it may have "
                "been dropped, or made by another router",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
                param=PREVIOUS,
            )
        if status not in _CONTINUABLE:
            raise InvalidRequestError(
                f"the previous response {_quoted(response_id)} is {status}; only one that is "
                f"{' or '.join(_CONTINUABLE)} can be continued",
                reason="PREVIOUS_RESPONSE_NOT_COMPLETED",
                param=PREVIOUS,
            )
        return turns

    def _find_item(self, tenant: TenantId, item_id: str, where: str) -> Item:
        if self._store is None:
            raise _store_off(where)
        item = self._store.get_item(tenant, item_id)
        if item is None:
            raise NotFoundError(
                f"{where}: the item {_quoted(item_id)} is not stored here",
                reason="ITEM_NOT_FOUND",
                param=where,
            )
        return item


def _make_id(prefix: str) -> str:
    """Return a new id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(24)}"


def _quoted(response_id: str) -> str:
    return repr(response_id[:MAX_QUOTED_ID_CHARS])


def _no_response(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"the response {_quoted(response_id)} is not stored here; it may have been deleted or "
        "dropped, or made by another router",
        reason="RESPONSE_NOT_FOUND",
    )


def _store_off(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} needs stored responses, and this router stores none "
        "(http_options.max_stored_responses is 0)",
        reason="RESPONSE_STORE_OFF",
        param=param,
    )
