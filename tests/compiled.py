"""The suites over compiled modules (`make test-compiled`, decision 48).

Compiled code sees nothing that a test puts in place of a part of it. Tests that do are skipped, by
what they do or by what Python says of it; of others nothing is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

from outrider.build_info import COMPILED, is_extension

_WHY = "it replaces a part of compiled code"
_REPLACES = re.compile(
    r"object attribute '\w+' is read-only"
    r"|interpreted classes cannot inherit from compiled"
    r"|object expected; got (types\.SimpleNamespace|tests\.|outrider_bench\.)"
)
_replace = pytest.MonkeyPatch.setattr


def _is_compiled(target: object) -> bool:
    """Whether this is a module or a class, or the name of something in one, that is compiled."""
    if isinstance(target, str):
        target = sys.modules.get(target.rpartition(".")[0])
    if isinstance(target, type):
        target = sys.modules.get(target.__module__)
    file = target.__file__ if isinstance(target, ModuleType) else None
    name = getattr(target, "__name__", "")
    return name.startswith("outrider") and is_extension(file or "")


def _replace_or_skip(
    patch: pytest.MonkeyPatch, target: object, *rest: object, **named: object
) -> None:
    if _is_compiled(target):
        pytest.skip(_WHY)
    _replace(patch, target, *rest, **named)  # type: ignore[arg-type, call-overload]


if COMPILED:
    pytest.MonkeyPatch.setattr = _replace_or_skip  # type: ignore[assignment, method-assign]


@pytest.fixture(autouse=True)
def like_the_drafting_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where sources are compiled they rely on that thread's inference mode."""
    drafts = COMPILED and "unit/drafter" in request.path.as_posix()
    with torch.inference_mode() if drafts else nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    """See above."""
    report: pytest.TestReport = yield
    if COMPILED and call.excinfo is not None and _REPLACES.search(str(call.excinfo.value)):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, _WHY)
    return report
