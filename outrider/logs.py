"""JSON logging of the three processes: one object a line on stderr, never prompts or token ids."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object with the keys ts, level, logger and event, then the
    fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line, with keys in a fixed order."""
        entry: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def check_level(level: str) -> None:
    """Raise ValueError if `level` is not a log level."""
    if level not in LOG_LEVELS:
        raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {level!r}")


def setup_logging(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Write every log record of this process from `level` on to `stream` as JSON lines. `stream`
    None means stderr."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
