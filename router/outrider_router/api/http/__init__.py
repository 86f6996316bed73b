"""OpenAI's HTTP API in the router's own event loop, beside gRPC and on the same `RouterService`.

acceptor.py                Acceptor of an HTTP port: counts connections before TLS and sets them up
                           one at a time.
app.py                     ASGI application of the HTTP API: routes, error handlers and the
                           published OpenAPI schema.
choice_streams.py          Generation responses over HTTP: all choices of a request, as one body or
                           as an event stream.
connection_slots.py        Connection slots of an HTTP server: a limit on connections, and eviction
                           of idle ones.
connections.py             HTTP/1.1 connections: timeouts for head and body, bounded parsing,
                           eviction at the limit.
dependencies.py            FastAPI dependencies of the routes: router service, caller and operator
                           of a request.
errors.py                  Maps typed errors to OpenAI error responses: one HTTP status per class of
                           `outrider.errors`.
event_streams.py           Sends responses to HTTP clients: whole bodies and server-sent events,
                           while the client listens.
generation_routes.py       Routes POST /v1/completions and POST /v1/chat/completions.
info_routes.py             Routes that do not generate: models, health, version, metrics, tokenize
                           and detokenize.
json_route.py              Route class for JSON bodies: pydantic's parser, bounded in depth and in
                           number of values.
logprobs.py                Log-probabilities of tokens in the OpenAI formats of chat and
                           completions.
middleware.py              ASGI middleware of every HTTP request: access control, body size limit
                           and request id.
request_models.py          Pydantic models of HTTP request bodies, with the field names of OpenAI
                           and vLLM.
request_translation.py     Translates HTTP request bodies into router requests, one per choice.
response_models.py         Pydantic models of HTTP responses, for the published OpenAPI schema only.
response_writers.py        Writers of completions and chat responses, whole and in stream chunks.
server.py                  HTTP server of the router: uvicorn in the router's own event loop.
structured_outputs.py      Structured-output fields of HTTP requests, in the formats of OpenAI and
                           vLLM.
unsupported_fields.py      Refuses OpenAI and vLLM request fields that would change an answer but
                           are not supported.
usage.py                   Token usage and speculation statistics of an answer, in OpenAI's and
                           vLLM's fields.
validation_errors.py       Error messages for invalid bodies: pydantic's errors in plain words.
"""

from outrider_router.api.http.app import make_app as make_app
from outrider_router.api.http.server import HttpServer as HttpServer
