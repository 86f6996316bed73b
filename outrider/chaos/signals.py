"""Faults that signals cause in local processes, given by process id: kill, terminate and stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import dataclass

from outrider.chaos.faults import FaultKind, FaultRole
from outrider.errors import InvalidRequestError, NotFoundError

KINDS = (FaultKind.KILL, FaultKind.TERMINATE, FaultKind.STOP)
"""Kinds of faults that can be injected by signals."""


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """A process that may be the target of an injected fault."""

    role: FaultRole
    pid: int

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


def parse_target(text: str) -> FaultTarget:
    """Parse "ROLE=PID". Raises InvalidRequestError if the text is malformed, and NotFoundError if
    no such process is running."""
    role, _, pid = text.partition("=")
    try:
        target = FaultTarget(FaultRole(role), int(pid))
    except ValueError:
        roles = ", ".join(role for role in FaultRole if role is not FaultRole.CLIENT)
        raise InvalidRequestError(
            f"{text!r} is not ROLE=PID with a role of {roles}", reason="INVALID_FLAG"
        ) from None
    if target.role is FaultRole.CLIENT or target.pid <= 1:
        raise InvalidRequestError(f"{text!r}: not a process to hit", reason="INVALID_FLAG")
    if not is_alive(target):
        raise NotFoundError(f"there is no process {target.pid}", reason="NO_PROCESS")
    return target


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Parse kinds of faults, separated by commas. Raises InvalidRequestError if the text is
    malformed or a kind is not in `KINDS`."""
    try:
        kinds = tuple(FaultKind(name) for name in text.split(",") if name)
    except ValueError:
        kinds = ()
    if not kinds or not set(kinds) <= set(KINDS):
        allowed = ", ".join(KINDS)
        raise InvalidRequestError(f"{text!r} is not a list of {allowed}", reason="INVALID_FLAG")
    return kinds


def is_alive(target: FaultTarget) -> bool:
    """Return whether the process is running."""
    try:
        os.kill(target.pid, 0)
    except ProcessLookupError:
        return False
    return True


def pick_fault(
    targets: list[FaultTarget], kinds: tuple[FaultKind, ...], rng: random.Random
) -> tuple[FaultKind, FaultTarget] | None:
    """Return a random kind of fault and a random target that is running, or None if none is
    running.

    A process that was restarted has a new process id and is not one of `targets`.
    """
    left = [target for target in targets if is_alive(target)]
    return (rng.choice(kinds), rng.choice(left)) if left else None


async def inject_fault(kind: FaultKind, target: FaultTarget, lasts_s: float) -> None:
    """Send the signal of a fault to a process.

    A stopped process continues after `lasts_s` seconds, or when this call is cancelled.
    """
    numbers = {
        FaultKind.KILL: signal.SIGKILL,
        FaultKind.TERMINATE: signal.SIGTERM,
        FaultKind.STOP: signal.SIGSTOP,
    }
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.pid, numbers[kind])
    if kind is not FaultKind.STOP:
        return
    try:
        await asyncio.sleep(lasts_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGCONT)
