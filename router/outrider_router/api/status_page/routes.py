"""Routes of the status page: static files, and the router's state in `/status.json`.

The files reveal nothing about the fleet. Only `/status.json` does, so this route needs the operator
check if API keys are required.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from fastapi import APIRouter
from fastapi.params import Depends
from fastapi.responses import JSONResponse, Response

from outrider_router.api.status_page.snapshot import make_snapshot
from outrider_router.requests.service import RouterService

_KINDS = {
    "status.html": "text/html; charset=utf-8",
    "status.css": "text/css; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # The page may load only its own files, and no other page may embed it in a frame.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def status_router(service: RouterService, guards: Sequence[Depends] = ()) -> APIRouter:
    """Create the routes GET /, /status.css, /status.js and /status.json of a router, which the
    OpenAPI description omits. `/status.json?history=true` includes the curves of the last minutes.

    `guards` are dependencies that refuse callers who may not see the state. They protect only
    /status.json; the page itself asks for another key if `guards` refuse the caller.
    """
    router = APIRouter(include_in_schema=False)
    folder = files("outrider_router.api.status_page") / "static"
    contents = {name: (folder / name).read_bytes() for name in _KINDS}

    def file(name: str) -> Response:
        return Response(contents[name], headers=_HEADERS, media_type=_KINDS[name])

    @router.get("/")
    async def page() -> Response:
        return file("status.html")

    @router.get("/status.css")
    async def style() -> Response:
        return file("status.css")

    @router.get("/status.js")
    async def script() -> Response:
        return file("status.js")

    @router.get("/status.json", dependencies=guards)
    async def state(history: bool = False) -> Response:
        snapshot = make_snapshot(service, with_history=history)
        return JSONResponse(snapshot, headers={"Cache-Control": "no-store"})

    return router
