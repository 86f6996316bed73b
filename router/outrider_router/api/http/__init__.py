"""OpenAI's HTTP API in the router's own event loop, beside gRPC and on the same `RouterService`.

acceptor.py                Accepts the connections of an HTTP port: counted before the TLS
                           handshake, which has a limit, and set up one at a time, so that a burst
                           of them does not hold the event loop.
app.py                     The ASGI application.
choice_streams.py          Serves the choices of one HTTP request.
connection_slots.py        Places of one HTTP server: how many connections it has, and which of them
                           makes way for another.
connections.py             Limits and timeouts of HTTP connections.
dependencies.py            FastAPI dependencies: router service, caller, operator.
errors.py                  Typed errors as OpenAI error responses.
generation_routes.py       /v1/completions and /v1/chat/completions.
info_routes.py             Models, health, version, metrics and tokenizer routes.
json_route.py              Route class that parses JSON bodies with a depth bound.
logprobs.py                Log-probabilities in OpenAI's formats.
middleware.py              ASGI middleware: access control, body limit, request ids.
request_models.py          Pydantic models of requests.
request_translation.py     Translates HTTP requests into router requests.
response_models.py         Pydantic models of responses.
response_writers.py        Writes chat and completion responses, whole and in chunks.
server.py                  uvicorn server in the router's event loop.
structured_outputs.py      Structured-output fields of requests.
unsupported_fields.py      Refuses OpenAI and vLLM fields that are not supported.
usage.py                   Usage and speculation statistics of responses.
validation_errors.py       What is wrong with a body, in plain words: pydantic's mistakes without
                           its internals. Pure.
"""

from outrider_router.api.http.app import make_app as make_app
from outrider_router.api.http.server import HttpServer as HttpServer
