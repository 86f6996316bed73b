"""Connections that ask for `/health` first are set up before others that wait."""

from __future__ import annotations

import pytest
from outrider_router.api.http.middleware import asks_for_open_path


@pytest.mark.parametrize(
    "first",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HEAD /ping HTTP/1.1\r\n",
        b"GET /health?probe=1 HTTP/1.1\r\n",
        b"GET /llm/health HTTP/1.1\r\n",
    ],
)
def test_a_request_for_health_is_urgent(first: bytes) -> None:
    assert asks_for_open_path(first, "/llm")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET",
        b"GET /healthy HTTP/1.1\r\n",
        b"GET /other/health HTTP/1.1\r\n",
        b"POST /health HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET \xff/health HTTP/1.1\r\n",
    ],
)
def test_everything_else_waits_its_turn(first: bytes) -> None:
    assert not asks_for_open_path(first, "/llm")
