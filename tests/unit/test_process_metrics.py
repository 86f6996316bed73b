"""What every process exports from its start, while it loads and while it serves."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter

import outrider
from outrider.process_metrics import COMMIT_VARIABLE, ProcessMetrics, ProcessState


def states(process: ProcessMetrics) -> dict[str, float | None]:
    return {
        state: process.registry.get_sample_value("outrider_process_state", {"state": state})
        for state in ProcessState
    }


def test_a_process_loads_serves_and_drains_and_is_in_one_state_at_a_time() -> None:
    process = ProcessMetrics()
    assert states(process) == {"loading": 1, "serving": 0, "draining": 0}
    process.set_state(ProcessState.SERVING)
    assert states(process) == {"loading": 0, "serving": 1, "draining": 0}
    process.set_state(ProcessState.DRAINING)
    assert states(process) == {"loading": 0, "serving": 0, "draining": 1}


@pytest.mark.parametrize("commit", ["", "0af7651"])
def test_the_build_is_named_and_the_commit_if_it_is_known(
    commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if commit:
        monkeypatch.setenv(COMMIT_VARIABLE, commit)
    else:
        monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    labels = {"version": outrider.__version__, "commit": commit}
    assert ProcessMetrics().registry.get_sample_value("outrider_build_info", labels) == 1


def test_use_of_memory_and_cpu_is_exported() -> None:
    registry = ProcessMetrics().registry
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert (registry.get_sample_value(name) or 0) > 0


def test_what_is_built_after_the_load_is_exported_beside_it() -> None:
    process, later = ProcessMetrics(), CollectorRegistry()
    Counter("things", "Things.", registry=later).inc()
    assert process.registry.get_sample_value("things_total") is None
    process.add_registry(later)
    assert process.registry.get_sample_value("things_total") == 1
