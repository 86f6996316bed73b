"""Fleet members: actors by role and number, and the groups of actors that are placed together."""

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
    """Number of the actor within its role, from 0."""

    @property
    def name(self) -> str:
        """Name of the actor, which is also its address and its id."""
        return f"{self.role.name.lower()}-{self.index}"


def member_of(name: str) -> FleetMember | None:
    """Return the member with this name, or None if no member has such a name."""
    role, _, number = name.rpartition("-")
    known = {each.name.lower(): each for each in MemberRole}
    if role not in known or not number.isascii() or not number.isdigit():
        return None
    member = FleetMember(known[role], int(number))
    return member if member.name == name else None


MemberGroup = tuple[FleetMember, ...]
"""Members of one Ray placement group. Its strategy places them near each other or apart."""


def members_of(verifiers: int, drafters: int) -> tuple[FleetMember, ...]:
    """Return the members of a fleet with these numbers of verifiers and drafters."""
    return (
        *(FleetMember(MemberRole.VERIFIER, index) for index in range(verifiers)),
        *(FleetMember(MemberRole.DRAFTER, index) for index in range(drafters)),
    )


def cells_of(verifiers: int, drafters: int) -> tuple[MemberGroup, ...]:
    """Return one cell for each verifier. A cell is a group of actors with a Ray placement group of
    its own. The drafters are distributed over the cells round-robin.

    Every drafter drafts for every verifier; a cell only says which actors are placed near each
    other.
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
    """Return the name of a cell's placement group in the fleet's namespace."""
    return f"outrider-{cell[0].name}"
