"""Hook of a drafter or a verifier: which files its calls enter, and which objects they hand over.

    --hook outrider_bench.hooks.call_census:switch=FILE,out=FILE.json

While the file `switch` exists, all calls of all threads are looked at; once it is gone, `out` has
`files`, the modules of this project in which a function ran, and `kinds`, the classes of this
project of which an instance passed from one of its modules to another, as an argument, a result, or
the first element of such. Generated modules do not count. The process is several times slower.
"""

from __future__ import annotations

import enum
import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

PACKAGES: Final = ("outrider", "outrider_verifier", "outrider_drafter", "outrider_router")
_LOOK_S: Final = 0.01


def install(hooks: object, *, switch: str, out: str) -> None:
    """Look at calls while the file `switch` exists, and write `out` then."""
    del hooks
    census = CallCensus()
    threading.setprofile(census.profile)
    sys.setprofile(census.profile)
    files = Path(switch), Path(out)
    threading.Thread(target=_watch, args=(census, *files), name="census", daemon=True).start()


def is_counted(module: str) -> bool:
    """Whether a module is one of this project's, and not generated."""
    return module.partition(".")[0] in PACKAGES and not module.endswith(("_pb2", "_pb2_grpc"))


class CallCensus:
    """What a profile function sees of the calls of its threads while it is asked to look."""

    def __init__(self) -> None:
        self._is_on = False
        self._files: set[str] = set()
        self._kinds: set[str] = set()

    def begin(self) -> None:
        """Look from now on."""
        self._is_on = True

    def end(self) -> dict[str, list[str]]:
        """Look no more; the `files` and `kinds` since `begin`, sorted."""
        self._is_on = False
        found = {"files": sorted(self._files), "kinds": sorted(self._kinds)}
        self._files, self._kinds = set(), set()
        return found

    def profile(self, frame: FrameType, event: str, result: Any) -> None:
        """See `sys.setprofile`."""
        if not self._is_on or event not in ("call", "return"):
            return
        module = str(frame.f_globals.get("__name__", ""))
        if not is_counted(module):
            return
        self._files.add(module)
        caller = frame.f_back
        above = "" if caller is None else str(caller.f_globals.get("__name__", ""))
        if not is_counted(above) or above == module:
            return
        values = [result] if event == "return" else _arguments(frame.f_code, frame.f_locals)
        self._kinds.update(kind for value in values if (kind := kind_of(value)) is not None)


def _watch(census: CallCensus, switch: Path, out: Path) -> None:
    """Follow the switch, for as long as the process runs."""
    was_on = False
    while True:
        time.sleep(_LOOK_S)
        is_on = switch.exists()
        if is_on and not was_on:
            census.begin()
        elif was_on and not is_on:
            temporary = out.with_suffix(".part")
            temporary.write_text(json.dumps(census.end()))
            temporary.rename(out)
        was_on = is_on


def _arguments(code: CodeType, values: Mapping[str, Any]) -> list[Any]:
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [values[name] for name in names if name not in ("self", "cls") and name in values]


def kind_of(value: object) -> str | None:
    """The name of the class of a value, or of its first element, if that is one of this project's
    and no enumeration; else None."""
    elements: Iterable[object] = ()
    # Not of their subclasses, which are kinds of their own.
    if type(value) is dict:
        elements = value.values()
    elif type(value) is list or type(value) is tuple or type(value) is set:
        elements = value
    value = next(iter(elements), value)
    kind = type(value)
    if not is_counted(kind.__module__) or issubclass(kind, (enum.Enum, type, BaseException)):
        return None
    return f"{kind.__module__}.{kind.__qualname__}"
