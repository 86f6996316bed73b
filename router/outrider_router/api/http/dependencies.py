"""FastAPI dependencies of the routes: router service, caller and operator of a request.

Routes check credentials only through these dependencies. If API keys are required, the middleware
identifies the caller before a route runs.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from outrider_router.api.http.middleware import CALLER
from outrider_router.base import tenants
from outrider_router.requests.service import RouterService


def get_service(request: Request) -> RouterService:
    """Return the router service that handles a request."""
    service: RouterService = request.app.state.service
    return service


async def caller(request: Request) -> tenants.Caller:
    """Return the caller of a request, identified as in the gRPC API. Raises InvalidRequestError for
    an invalid tenant name.
    """
    access_control = get_service(request).access_control
    if access_control.requires_keys:
        # The middleware has already identified the caller.
        known: tenants.Caller = request.scope[CALLER]
        return known
    return access_control.identify_caller(request.headers.items())


async def operator(request: Request) -> None:
    """Check that the caller is an operator, if API keys are required.

    Raises UnauthenticatedError without a valid key, and PermissionDeniedError for a key that is not
    an operator's.
    """
    get_service(request).access_control.authorize_operator(request.headers.get("authorization"))


Caller = Annotated[tenants.Caller, Depends(caller)]
Operator = Annotated[None, Depends(operator)]
Service = Annotated[RouterService, Depends(get_service)]
