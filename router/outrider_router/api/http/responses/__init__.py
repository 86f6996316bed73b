"""OpenAI's Responses API: POST /v1/responses, and the routes of stored responses.

A request for a response is translated into the same router request as a chat. Stored responses, and
those that run in the background, are in the memory of one router.

events.py                  Output items of a response, and the typed events of its stream.
input_items.py             Input items: how they are listed, and the conversation that they make up.
request_models.py          Pydantic models of the request body.
response_models.py         Pydantic models of responses, for the published OpenAPI schema only.
routes.py                  Routes of the Responses API.
service.py                 Serves responses: whole, as a stream and in the background.
store.py                   Store of responses: bounded in number, in bytes and in age.
translation.py             Translates the request body into a router request, and into the members
                           of a response that repeat it.
"""
