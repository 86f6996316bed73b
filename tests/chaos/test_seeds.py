"""Fleets in one process, each under the faults of its seed: no text changes, nothing is left.

`outrider chaos --seeds A-B` runs more of them, `--replay SEED` one of them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider_chaos import schedule_run as runs
from outrider_chaos import seed_runs
from outrider_chaos.schedule_run import RunOutcome
from outrider_chaos.seed_runs import SeedTally, make_tiny, replay, run_seeds

from outrider.chaos import checker
from outrider.chaos.checker import AllowedError, CheckViolation, ExpectedAnswer
from outrider.chaos.faults import FaultRole
from outrider.chaos.history import ClientHistory
from outrider.chaos.schedule import FaultSchedule

SAMPLE = range(28)
PROCESSES = 3
"""More than there are cores: a run waits for its clocks half of the time."""
ODD = 7
"""A seed whose clients all hear their whole answers."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.timeout(400)
def test_a_sample_of_seeds_breaks_no_promise(tiny: tuple[Path, Path]) -> None:
    tally = SeedTally()
    run_seeds(SAMPLE, *tiny, jobs=PROCESSES, on_outcome=tally.add)
    assert not tally.failed, "\n\n".join(map(str, tally.failed))
    assert tally.runs == len(SAMPLE)
    # Not for want of faults.
    for role in FaultRole:
        assert any(cell.startswith(role.value) for cell in tally.hits)
    assert tally.preemptions > 0
    assert tally.ends["finished"] > 3 * tally.ends["failed"]


@pytest.fixture
def one_token_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients hear one token that is another."""

    def check(
        history: ClientHistory, expected: ExpectedAnswer, *, allowed: AllowedError
    ) -> list[CheckViolation]:
        for heard in history.heard[-1:]:
            heard.token_ids = (*heard.token_ids[:-1], heard.token_ids[-1] + 1)
        return checker.check_history(history, expected, allowed=allowed)

    monkeypatch.setattr(runs, "check_history", check)
    yield


def test_a_changed_text_is_found_shown_and_shrunk(
    tiny: tuple[Path, Path], one_token_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.disable", lambda level: None)
    outcome: RunOutcome = replay(ODD, *tiny, shrinks=True)
    assert {violation.promise for violation in outcome.violations} == {"text"}
    assert "differs at" in str(outcome)
    # No fault is needed for what is wrong here, and one request shows it.
    assert outcome.schedule.faults == ()
    assert len(outcome.schedule.asks) == 1
    assert FaultSchedule.from_seed(ODD).asks[0].text in {
        text for text in seed_runs._SeedProcess.oracle
    }
