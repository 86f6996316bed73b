"""The suites over compiled modules (`make test-compiled`, decision 48)."""

from __future__ import annotations

import re

import pytest

from outrider.compiled import COMPILED

_REPLACES = re.compile(
    r"object attribute '\w+' is read-only"
    r"|interpreted classes cannot inherit from compiled"
    r"|object expected; got (types\.SimpleNamespace|tests\.|outrider_bench\.)"
)
"""What Python says where a test puts something of its own in place of a part of a compiled class:
that cannot be done."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    """Skip tests that cannot be had of compiled classes; of others nothing is."""
    report: pytest.TestReport = yield
    if COMPILED and call.excinfo is not None and _REPLACES.search(str(call.excinfo.value)):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, "it replaces a part of a compiled class")
    return report
