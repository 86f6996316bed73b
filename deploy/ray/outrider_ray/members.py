"""Fleet members: actors by role and number, and the cells that are placed together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class MemberRole(IntEnum):
    """Role of an actor."""

    VERIFIER = 0
    DRAFTER = 1


@dataclass(frozen=True, slots=True, order=True)
class FleetMember:
    """Role and number of one actor of a fleet."""

    role: MemberRole
    index: int
    """Number among those of its role, from 0."""

    @property
    def name(self) -> str:
        """The actor's name, which is its address and its id."""
        return f"{self.role.name.lower()}-{self.index}"


def member_of(name: str) -> FleetMember | None:
    """The member with this name; None for names of others."""
    role, _, number = name.rpartition("-")
    known = {each.name.lower(): each for each in MemberRole}
    if role not in known or not number.isascii() or not number.isdigit():
        return None
    member = FleetMember(known[role], int(number))
    return member if member.name == name else None


MemberGroup = tuple[FleetMember, ...]
"""Members that are placed together, or apart: one placement group."""


def members_of(verifiers: int, drafters: int) -> tuple[FleetMember, ...]:
    """The members of a fleet of so many."""
    return (
        *(FleetMember(MemberRole.VERIFIER, index) for index in range(verifiers)),
        *(FleetMember(MemberRole.DRAFTER, index) for index in range(drafters)),
    )


def cells_of(verifiers: int, drafters: int) -> tuple[MemberGroup, ...]:
    """A cell for each verifier; drafters are dealt to them in turn.

    Every drafter drafts for every verifier: its cell says whom it is near to, no more.
    """
    return tuple(
        (
            FleetMember(MemberRole.VERIFIER, number),
            *(
                FleetMember(MemberRole.DRAFTER, index)
                for index in range(number, drafters, verifiers)
            ),
        )
        for number in range(verifiers)
    )


def group_name(cell: MemberGroup) -> str:
    """Name of a cell's placement group, in the launcher's namespace."""
    return f"outrider-{cell[0].name}"
