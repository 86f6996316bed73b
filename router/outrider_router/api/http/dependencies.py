"""FastAPI dependencies of the routes: router service, caller and operator of a request.

Routes look at credentials nowhere else. Where API keys are required, the middleware has identified
the caller before.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from outrider_router.api.http.middleware import CALLER
from outrider_router.base import api_keys
from outrider_router.requests.service import RouterService


def service_of(request: Request) -> RouterService:
    """The router that a request came to."""
    service: RouterService = request.app.state.service
    return service


async def caller(request: Request) -> api_keys.Caller:
    """Whoever sends a request, as over gRPC. Raises InvalidRequestError."""
    access_control = service_of(request).gate
    if access_control.requires_keys:
        # Looked up where the request came in.
        known: api_keys.Caller = request.scope[CALLER]
        return known
    return access_control.identify_caller(request.headers.items())


async def operator(request: Request) -> None:
    """Let operators in alone, where API keys are asked for. Raises UnauthenticatedError,
    PermissionDeniedError."""
    service_of(request).gate.authorize_operator(request.headers.get("authorization"))


Caller = Annotated[api_keys.Caller, Depends(caller)]
Operator = Annotated[None, Depends(operator)]
Service = Annotated[RouterService, Depends(service_of)]
