"""Whose request it is, by its headers: the one place where credentials are looked at."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from outrider.ids import TenantId
from outrider_router.service import RouterService
from outrider_router.tenants import tenant_of


def service_of(request: Request) -> RouterService:
    """The router that a request came to."""
    service: RouterService = request.app.state.service
    return service


async def caller(request: Request) -> TenantId:
    """The tenant that a request is charged to, as over gRPC. Raises InvalidRequestError."""
    source = service_of(request).config.overload.tenant_from
    return tenant_of(source, request.headers.items())


Caller = Annotated[TenantId, Depends(caller)]
Service = Annotated[RouterService, Depends(service_of)]
