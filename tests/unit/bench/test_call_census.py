"""The census of calls counts modules and classes of this project that calls enter and hand over."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from outrider_bench.hooks.call_census import install, is_counted, kind_of

from outrider.spec import plan, sampling
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import DraftTree
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("module", "counted"),
    [
        ("outrider.spec.plan", True),
        ("outrider_verifier.engine.core", True),
        ("outrider.wire.v1.common_pb2", False),
        ("outrider_bench.models", False),
        ("json", False),
    ],
)
def test_generated_modules_and_those_of_others_do_not_count(module: str, counted: bool) -> None:
    assert is_counted(module) is counted


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (SamplingParams(), "outrider.spec.sampling.SamplingParams"),
        ([SamplingParams()], "outrider.spec.sampling.SamplingParams"),
        ({"a": SpeculationPlan()}, "outrider.spec.plan.SpeculationPlan"),
        (DraftMethod.NONE, None),
        ((), None),
        (3, None),
        (SamplingParams, None),
    ],
)
def test_a_kind_is_a_class_of_this_project(value: object, kind: str | None) -> None:
    assert kind_of(value) == kind


def test_it_looks_while_its_switch_is_there(tmp_path: Path) -> None:
    switch, out = tmp_path / "on", tmp_path / "out.json"
    before, before_threads = sys.getprofile(), threading.getprofile()
    try:
        install(None, switch=str(switch), out=str(out), round="outrider.spec.plan/default_depth")
        switch.touch()

        def is_seen() -> bool:
            tree = DraftTree.chain([1, 2, 3])
            for _ in range(3):
                assert plan.default_depth(7) and sampling.SamplingParams().for_drafter()
            if len(tree.tokens):
                switch.unlink(missing_ok=True)
            return out.exists()

        # The switch is seen by a thread that looks now and then.
        wait_until(lambda: (switch.touch(), threading.Event().wait(0.05), is_seen())[-1])
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)
    found = json.loads(out.read_text())
    assert found["rounds"] >= 1 and found["kinds"] == []
    assert {"outrider.spec.plan", "outrider.spec.sampling"} <= set(found["files"])
