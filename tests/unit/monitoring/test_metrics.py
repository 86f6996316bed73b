"""Names of metrics: as Prometheus wants them, and as the documentation lists them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.monitoring.families import (
    Family,
    drafter_families,
    process_families,
    router_families,
    table,
    verifier_families,
    vllm_families,
)

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
PROCESSES = {
    "process": process_families,
    "router": router_families,
    "verifier": verifier_families,
    "drafter": drafter_families,
    "vllm": vllm_families,
}


@pytest.mark.parametrize("process", PROCESSES)
def test_the_documentation_lists_what_a_process_exports(process: str) -> None:
    expected = table(PROCESSES[process]())
    section = re.search(rf"<!-- {process} -->\n(.*?)<!-- -->", DOCS.read_text(), re.DOTALL)
    assert section is not None, f"{DOCS.name} has no table of the {process}"
    rows = [line for line in section[1].splitlines() if line.startswith("| `")]
    assert "\n".join(rows) == expected, f"the table of the {process} should be:\n{expected}"


@pytest.mark.parametrize("families", [router_families, verifier_families, drafter_families])
def test_names_follow_the_conventions_of_prometheus(families: Callable[[], list[Family]]) -> None:
    names = [family.name for family in families()]
    assert len(names) == len(set(names)) > 10
    for family in families():
        assert re.fullmatch(r"outrider_[a-z][a-z0-9_]*", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not re.search(r"_(ms|us|minutes|percent|mb|kb)(_|$)", family.name), "base units only"
        assert family.text, f"{family.name} says nothing of itself"


def test_processes_share_no_metric_but_one() -> None:
    names = [{f.name for f in PROCESSES[p]()} for p in ("router", "verifier", "drafter")]
    shared = (names[0] & names[1]) | (names[0] & names[2]) | (names[1] & names[2])
    # A router's by cause of its own, a verifier's after preemptions.
    assert shared == {"outrider_resumed_sessions_total"}
