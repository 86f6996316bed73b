"""Hook of a drafter or a verifier that records the modules and classes that take part in a round.

    --hook outrider_bench.hooks.call_census:switch=FILE,out=FILE.json,round=MODULE/FUNCTION

While the file `switch` exists, the calls of all threads are recorded round by round. A round begins
with a call of the function that `round` names. Once the file is removed, the results are written to
`out`: the number of complete rounds (`rounds`), and what occurred in at least half of them:

* `files`: the modules of this project in which a function ran;
* `kinds`: the classes of this project of which an instance passed from one of its modules to
  another one, as an argument, as a result, or as the first element of an argument or a result.

Callbacks that send or receive a heartbeat or answer a health poll do not count, because they occur
at fixed times, and several times in a slow round. Callbacks that begin in the gRPC transport do not
count either. Between processes of one host gRPC carries only heartbeats and health polls, because
verdicts, proposals and session events use shared memory.

What happens in fewer than half of the rounds (a scrape of metrics, a KV block every few tokens) is
not part of a steady round. Functions of generated code (protocol buffers, methods that `dataclass`
makes) do not count, but the classes of their arguments do. The process is several times slower
while calls are recorded.
"""

from __future__ import annotations

import enum
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

PACKAGES: Final = ("outrider", "outrider_verifier", "outrider_drafter", "outrider_router")
TIMED_KINDS: Final = frozenset(
    {
        "outrider.wire.messages.Heartbeat",
        "outrider.wire.server_info.VerifierInfo",
        "outrider.wire.server_info.DrafterInfo",
    }
)
"""Classes of heartbeats and of answers to health polls, which are sent at fixed times."""
TIMED_MODULES: Final = ("outrider.transport.grpc.", "outrider.transport.heartbeat")
"""Modules in which callbacks begin that only handle heartbeats and health polls."""
MAX_LOOKS: Final = 16
"""Maximum number of times that the values of one function's calls from one module are examined in a
round, because each examination takes time."""
_EVENTS: Final = frozenset({"call", "return"})
_LOOK_S: Final = 0.01


def install(hooks: object, *, switch: str, out: str, round: str) -> None:
    """Record calls while the file `switch` exists, and write `out` when it is removed."""
    del hooks
    module, _, function = round.partition("/")
    census = CallCensus((module, function))
    threading.setprofile(census.profile)
    sys.setprofile(census.profile)
    files = Path(switch), Path(out)
    threading.Thread(target=_watch, args=(census, *files), name="census", daemon=True).start()


@cache
def is_counted(module: str) -> bool:
    """Return whether a module belongs to this project and is not generated."""
    return module.partition(".")[0] in PACKAGES and not module.endswith(("_pb2", "_pb2_grpc"))


class _ThreadRun(threading.local):
    """Record of one thread from a call into this project until this call returns, for instance of a
    callback of an event loop."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_timed = False
        """Whether the call is into one of `TIMED_MODULES`."""
        self.files: set[str] = set()
        self.kinds: set[str] = set()


class CallCensus:
    """Records the calls that its profile function sees between `begin` and `end`."""

    def __init__(self, round_begin: tuple[str, str] | None = None) -> None:
        """Create a census. `round_begin` is the module and the name of the function whose call
        begins a round. With None, calls are not grouped by round."""
        self._round_begin = round_begin
        self._is_on = False
        self._reset()

    def _reset(self) -> None:
        self._run = _ThreadRun()
        self._has_begun = False
        """Whether a round has begun."""
        self._rounds = 0
        """Number of complete rounds so far."""
        self._files: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._round_files: set[str] = set()
        self._round_kinds: set[str] = set()
        self._looks: Counter[tuple[CodeType, str, str]] = Counter()
        """Number of times that the values of a function's calls from a module were examined in this
        round."""

    def begin(self) -> None:
        """Begin to record calls."""
        self._is_on = True

    def end(self) -> dict[str, Any]:
        """End the census and return the sorted `files` and `kinds` since `begin`; see the module's
        docstring.

        If calls are grouped by round, the result also has the number of complete rounds (`rounds`),
        and only files and kinds that occurred in at least half of them.
        """
        self._is_on = False
        found: dict[str, Any] = {}
        if self._round_begin is None:
            found |= {"files": sorted(self._round_files), "kinds": sorted(self._round_kinds)}
        else:
            found["rounds"] = self._rounds
            for name, counts in (("files", self._files), ("kinds", self._kinds)):
                found[name] = sorted(
                    each for each, count in counts.items() if 2 * count >= self._rounds
                )
        self._reset()
        return found

    def profile(self, frame: FrameType, event: str, result: Any) -> None:
        """Record a call or a return. This is a profile function for `sys.setprofile`."""
        if not self._is_on or event not in _EVENTS:
            return
        module, code = _module_of(frame), frame.f_code
        if not is_counted(module):
            return
        if event == "call" and (module, code.co_name) == self._round_begin:
            self._end_round()
        run = self._run
        if not run.depth and event == "call":
            run.is_timed = module.startswith(TIMED_MODULES)
        run.depth = max(0, run.depth + (1 if event == "call" else -1))
        if not code.co_filename.startswith("<"):
            run.files.add(module)
        above = "" if frame.f_back is None else _module_of(frame.f_back)
        if above != module and is_counted(above):
            self._look_at_values(frame, event, result, above)
        if not run.depth or self._round_begin is None:
            self._end_run()

    def _look_at_values(self, frame: FrameType, event: str, result: Any, above: str) -> None:
        place = (frame.f_code, above, event)
        looks = self._looks[place]
        if looks == MAX_LOOKS and self._round_begin is not None:
            return
        self._looks[place] = looks + 1
        values = [result] if event == "return" else _arguments(frame.f_code, frame.f_locals)
        self._run.kinds.update(kind for value in values if (kind := kind_of(value)) is not None)

    def _end_run(self) -> None:
        run = self._run
        is_timed = run.is_timed or bool(run.kinds & TIMED_KINDS)
        if not is_timed or self._round_begin is None:
            self._round_files |= run.files
            self._round_kinds |= run.kinds
        run.files, run.kinds, run.is_timed = set(), set(), False

    def _end_round(self) -> None:
        files, self._round_files = self._round_files, set()
        kinds, self._round_kinds = self._round_kinds, set()
        if self._has_begun:
            self._files.update(files)
            self._kinds.update(kinds)
            self._rounds += 1
        self._has_begun = True
        self._looks.clear()


def _watch(census: CallCensus, switch: Path, out: Path) -> None:
    """Begin the census when the file `switch` appears, and end it when the file is removed, as long
    as the process runs."""
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


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _arguments(code: CodeType, values: Mapping[str, Any]) -> list[Any]:
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [values[name] for name in names if name not in ("self", "cls") and name in values]


def kind_of(value: object) -> str | None:
    """Return the name of a value's class or, for a container, of its first element's class. Return
    None if the class is not of this project, or is an enumeration, a type or an exception."""
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
