"""ASGI application of the HTTP API: routes, error handlers and the published OpenAPI schema."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import outrider
from outrider.errors import OutriderError
from outrider_router.api.http import generation_routes, info_routes
from outrider_router.api.http.dependencies import operator
from outrider_router.api.http.errors import (
    handle_http_error,
    handle_typed_error,
    handle_validation_error,
)
from outrider_router.api.http.json_route import JsonParser
from outrider_router.api.http.middleware import REQUEST_ID, RequestMiddleware
from outrider_router.api.http.responses import routes as response_routes
from outrider_router.api.http.responses.service import ResponseService
from outrider_router.api.status_page import status_router
from outrider_router.requests.service import RouterService

DESCRIPTION = "OpenAI's API, served by speculative decoding."


def make_app(service: RouterService) -> ASGIApp:
    """Create the ASGI application with all routes and middleware."""
    options = service.config.http_options
    guard = RequestMiddleware(make_api(service), service.access_control, options, service.arrivals)
    if not options.cors_origins:
        return guard
    # Outside of the access check, because browsers send CORS preflight requests without a key.
    return CORSMiddleware(
        guard,
        allow_origins=options.cors_origins,
        allow_methods=["DELETE", "GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after", "retry-after-ms"],
    )


def make_api(service: RouterService) -> FastAPI:
    """Create the FastAPI application with the routes but without middleware."""
    root_path = service.config.http_options.root_path
    app = FastAPI(
        title="Outrider",
        version=outrider.__version__,
        description=DESCRIPTION,
        # FastAPI's documentation pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        servers=[{"url": root_path}] if root_path else None,
    )
    app.state.service = service
    app.state.created = int(time.time())
    app.state.json_parser = JsonParser(service.config.http_options.max_json_values)
    app.state.responses = ResponseService(service)
    app.include_router(generation_routes.router)
    app.include_router(response_routes.router)
    app.include_router(info_routes.router)
    app.include_router(status_router(service, [Depends(operator)]))
    app.add_exception_handler(OutriderError, handle_typed_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(Exception, handle_typed_error)
    _publish(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name if route.path != "/ping" else "ping"


def _publish(app: FastAPI) -> None:
    """Remove FastAPI's error schemas from the OpenAPI description, because errors have OpenAI's
    format.
    """
    schema: dict[str, Any] = app.openapi()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
