"""OpenAI's HTTP API in the router's own event loop, beside gRPC and on the same `RouterService`."""

from outrider_router.api.http.app import make_app as make_app
from outrider_router.api.http.server import HttpServer as HttpServer
