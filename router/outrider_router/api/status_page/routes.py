"""Routes of the status page: static files, and the router's state in `/status.json`.

The files reveal nothing about the fleet; only `/status.json` does, so that is the route which a
token must protect where tokens are in use.
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
    # Nothing but its own files, and nobody may frame it.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def status_router(service: RouterService, guards: Sequence[Depends] = ()) -> APIRouter:
    """GET /, /status.css, /status.js and /status.json of a router; none is in the OpenAPI.

    `guards` refuse who may not see the state; the page itself is for whoever may call the router,
    and asks for another token where that is not enough.
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
    async def state() -> Response:
        return JSONResponse(make_snapshot(service), headers={"Cache-Control": "no-store"})

    return router
