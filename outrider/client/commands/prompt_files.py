"""Prompt files of `outrider generate`: one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import InvalidRequestError, NotFoundError

Turns = tuple[str, ...]
"""User messages of one conversation, in order."""


def read_prompts(path: Path) -> list[Turns]:
    """Return the user messages of each line of a JSON Lines file. A line is {"prompt": TEXT} or
    {"turns": [TEXT, ...]}; other keys are ignored.

    Raises NotFoundError or InvalidRequestError with the name of the file and the number of the
    line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(f"no prompts file at {path}", reason="NO_PROMPTS") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"{path} cannot be read: {error}") from error
    # Not splitlines(): JSON strings may hold the other characters that it splits at.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise _invalid(f"{path} holds no prompts")
    return prompts


def _parse(line: str, where: str) -> Turns:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise _invalid(f"{where} is not JSON: {error}") from error
    match entry:
        case {"prompt": str(prompt)} if "turns" not in entry:
            return (prompt,)
        case {"turns": [_, *_] as turns} if "prompt" not in entry:
            if all(isinstance(turn, str) for turn in turns):
                return tuple(turns)
    raise _invalid(f'{where} must be {{"prompt": TEXT}} or {{"turns": [TEXT, ...]}}')


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_PROMPTS")
