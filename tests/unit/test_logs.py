"""Logs are JSON lines that carry what was given as `extra`."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from outrider.logs import setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream that the root logger writes to; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    output = io.StringIO()
    setup_logging("INFO", output)
    yield output
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_record_is_one_json_object_with_its_extra_fields(stream: io.StringIO) -> None:
    logging.getLogger("outrider.x").info("drafter %s", "attached", extra={"drafter": "d0"})
    entry = json.loads(stream.getvalue())
    assert (entry["event"], entry["drafter"]) == ("drafter attached", "d0")
    assert (entry["level"], entry["logger"]) == ("info", "outrider.x")


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("outrider.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: boom" in json.loads(line)["traceback"]


def test_records_below_the_level_are_dropped(stream: io.StringIO) -> None:
    logging.getLogger("outrider.x").debug("detail")
    assert stream.getvalue() == ""
