"""Faults for processes of this machine, by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import dataclass

from outrider.chaos.faults import Kind, Role
from outrider.errors import InvalidRequestError, NotFoundError

KINDS = (Kind.KILL, Kind.TERMINATE, Kind.STOP)
"""What signals can do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A process that may be hit."""

    role: Role
    pid: int

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


def parse_target(text: str) -> Target:
    """ROLE=PID of a process that runs. Raises InvalidRequestError or NotFoundError."""
    role, _, pid = text.partition("=")
    try:
        target = Target(Role(role), int(pid))
    except ValueError:
        roles = ", ".join(role for role in Role if role is not Role.CLIENT)
        raise InvalidRequestError(
            f"{text!r} is not ROLE=PID with a role of {roles}", reason="INVALID_FLAG"
        ) from None
    if target.role is Role.CLIENT or target.pid <= 1:
        raise InvalidRequestError(f"{text!r}: not a process to hit", reason="INVALID_FLAG")
    if not alive(target):
        raise NotFoundError(f"there is no process {target.pid}", reason="NO_PROCESS")
    return target


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """Kinds of faults, separated by commas. Raises InvalidRequestError."""
    try:
        kinds = tuple(Kind(name) for name in text.split(",") if name)
    except ValueError:
        kinds = ()
    if not kinds or not set(kinds) <= set(KINDS):
        allowed = ", ".join(KINDS)
        raise InvalidRequestError(f"{text!r} is not a list of {allowed}", reason="INVALID_FLAG")
    return kinds


def alive(target: Target) -> bool:
    """Whether the process is there."""
    try:
        os.kill(target.pid, 0)
    except ProcessLookupError:
        return False
    return True


def pick(
    targets: list[Target], kinds: tuple[Kind, ...], rng: random.Random
) -> tuple[Kind, Target] | None:
    """What happens next, and to whom; None if nobody is left. Only what runs is hit: a keeper's
    new process has another id."""
    left = [target for target in targets if alive(target)]
    return (rng.choice(kinds), rng.choice(left)) if left else None


async def hit(kind: Kind, target: Target, lasts_s: float) -> None:
    """Let it happen; what is stopped goes on after a while, also if this is cancelled."""
    numbers = {Kind.KILL: signal.SIGKILL, Kind.TERMINATE: signal.SIGTERM, Kind.STOP: signal.SIGSTOP}
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.pid, numbers[kind])
    if kind is not Kind.STOP:
        return
    try:
        await asyncio.sleep(lasts_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGCONT)
