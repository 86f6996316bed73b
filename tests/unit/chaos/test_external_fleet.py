"""Flags and reports of `outrider chaos` for a running fleet, and signals that reach processes."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider_chaos.__main__ import main

from outrider.chaos.checker import CheckViolation
from outrider.chaos.faults import FaultKind, FaultRole
from outrider.chaos.history import ClientHistory
from outrider.chaos.report import describe, quantile
from outrider.chaos.signals import (
    FaultTarget,
    inject_fault,
    is_alive,
    parse_kinds,
    parse_target,
    pick_fault,
)
from outrider.errors import InvalidRequestError, NotFoundError, UnavailableError
from outrider.wire.inference import Delta
from tests.waiting import until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_targets_are_roles_and_processes_that_run(sleeper: subprocess.Popen[bytes]) -> None:
    target = parse_target(f"verifier={sleeper.pid}")
    assert target == FaultTarget(FaultRole.VERIFIER, sleeper.pid)
    assert is_alive(target)
    for text in ("verifier", "verifier=x", "client=77", "king=3", "router=1", "router=-1"):
        with pytest.raises(InvalidRequestError):
            parse_target(text)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(NotFoundError):
        parse_target(f"verifier={sleeper.pid}")
    assert pick_fault([target], (FaultKind.KILL,), random.Random(1)) is None


def test_only_what_signals_can_do_is_a_fault_for_processes() -> None:
    assert parse_kinds("kill,stop") == (FaultKind.KILL, FaultKind.STOP)
    for text in ("", "explode", "kill,cut"):
        with pytest.raises(InvalidRequestError):
            parse_kinds(text)


async def test_a_stopped_process_goes_on_and_a_killed_one_does_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    target = FaultTarget(FaultRole.DRAFTER, sleeper.pid)
    stopping = asyncio.create_task(inject_fault(FaultKind.STOP, target, 60.0))
    await until(lambda: state(sleeper.pid) == "T")
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    assert state(sleeper.pid) != "T"
    await inject_fault(FaultKind.KILL, target, 0.0)
    assert sleeper.wait(5) == -9
    await inject_fault(FaultKind.TERMINATE, target, 0.0)


def test_a_report_counts_gaps_ends_errors_and_what_is_wrong() -> None:
    whole, broken = ClientHistory(number=0), ClientHistory(number=1)
    for at in (0.1, 0.2, 1.2):
        whole.add_delta(Delta(text="a", token_ids=(1,)), at)
    whole.finished(None, 1.3)
    broken.failed(UnavailableError("gone", reason="VERIFIER_LOST"), 0.5)
    wrong = [
        CheckViolation(promise="text", detail="request 0 differs"),
        CheckViolation(promise="leak", detail="1"),
    ]
    text = describe([whole, broken], wrong, ["1.0 s: kill verifier 7"])
    assert "2 requests: 1 failed, 1 finished" in text
    assert "not those of a calm run: 1" in text
    assert "longest 1.00 s" in text
    assert "errors: 1 UnavailableError (VERIFIER_LOST)" in text
    assert "VIOLATION leak: 1" in text
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0


@pytest.mark.parametrize(
    "flags",
    [["--process", "drafter=0"], ["--faults", "explode"], ["--process", "drafter=99999999"]],
)
def test_flags_that_make_no_sense_are_misuse(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--router", "127.0.0.1:1", *flags]) == 2
    assert capsys.readouterr().err.startswith("outrider chaos: ")
