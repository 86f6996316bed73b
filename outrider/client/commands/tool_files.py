"""Tool files of `outrider generate`: JSON with tools in the form of OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.client.tools import make_tools
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.tools import Tool


def read_tools(path: Path) -> tuple[Tool, ...]:
    """Return the tools of a JSON file: a list of tools, or one tool (see `make_tools`).

    Raises NotFoundError or InvalidRequestError with the name of the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(f"no tools file at {path}", reason="NO_TOOLS") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{path} is not JSON: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(f"{path} cannot be read: {error}") from None
    tools = found if isinstance(found, list) else [found]
    if not tools:
        raise _invalid(f"{path} holds no tools")
    try:
        return make_tools(tools)
    except InvalidRequestError as error:
        raise _invalid(f"{path}: {error.message}") from None


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_TOOLS")
