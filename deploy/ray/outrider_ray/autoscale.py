"""Autoscaling policy: number of verifiers and drafters of a fleet. Pure: decides from the load.

A pool is the members of one role. It is *hot* while requests queue or its members are nearly full,
and *cold* while one member fewer would suffice. A pool changes only after such a state has lasted
for some time, by one member at a time, with a pause after each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider_ray.members import FleetMember, MemberRole


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Thresholds of growing and shrinking pools; keys of the table `[autoscale]`."""

    max_verifiers: int = 0
    """Maximum number of verifiers; 0 means the number at the start."""
    max_drafters: int = 0
    """Maximum number of drafters; 0 means the number at the start."""
    queue_per_verifier: float = 4.0
    """Number of waiting requests per verifier at which a verifier is added."""
    sessions_per_drafter: int = 64
    """Number of sessions at which a drafter counts as full, unless its own maximum is lower."""
    high_load: float = 0.85
    """Load, as a share of the members' capacity, from which a member is added."""
    low_load: float = 0.6
    """A member is removed if the load of the others would then be at most this share."""
    up_after_s: float = 5.0
    """Time in seconds that the load must stay high before a pool grows."""
    down_after_s: float = 120.0
    """Time in seconds that the load must stay low before a pool shrinks."""
    cool_down_s: float = 30.0
    """Minimum time between two changes of a pool, in seconds."""
    drain_timeout_s: float = 60.0
    """Maximum time for moving the sessions of a removed member, in seconds."""
    look_s: float = 1.0
    """Interval at which the load is evaluated, in seconds."""

    def __post_init__(self) -> None:
        for name in ("max_verifiers", "max_drafters", "up_after_s", "down_after_s", "cool_down_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("queue_per_verifier", "sessions_per_drafter", "drain_timeout_s", "look_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if not 0.0 < self.low_load < self.high_load <= 1.0:
            raise ValueError("low_load and high_load must satisfy 0 < low_load < high_load <= 1")

    def max_members(self, role: MemberRole, least: int) -> int:
        """Return the maximum number of members of a role, which is never less than the minimum
        `least`."""
        return max(least, (self.max_verifiers, self.max_drafters)[role])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLoad:
    """Current load of one member."""

    member: FleetMember
    sessions: int = 0
    load: float = 0.0
    """Used share of the member's capacity, from 0 to 1 (more if overcommitted)."""
    ready: bool = True
    """Whether the member serves; otherwise it is being created or replaced."""
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """Input of `plan_scaling`: the members of one role with their loads, and since when the pool
    has been overloaded or underused."""

    role: MemberRole
    min_members: int
    """Minimum number of members. Members with an index below it are never removed."""
    max_members: int
    members: tuple[MemberLoad, ...]
    waiting: int = 0
    """Number of requests that wait for this pool."""
    hot_since: float | None = None
    cold_since: float | None = None
    changed_at: float | None = None
    """Time of the last change of the pool's size, in seconds; None if it never changed."""


@dataclass(frozen=True, slots=True)
class Create:
    """Action: create one more member."""

    member: FleetMember


@dataclass(frozen=True, slots=True)
class Drain:
    """Action: move a member's sessions to other members, then remove the member."""

    member: FleetMember


Action = Create | Drain


@dataclass(slots=True)
class Memory:
    """Times that the autoscaler keeps for one pool between two evaluations of its load.

    All times are in seconds of one clock. `hot_since` and `cold_since` say since when the pool has
    been overloaded or underused; None means that it is not. `changed_at` is the time of the last
    change of the pool's size; None means that it never changed.
    """

    hot_since: float | None = None
    cold_since: float | None = None
    changed_at: float | None = None


@dataclass(slots=True)
class Memories:
    """Times that the autoscaler keeps for the pools of a fleet between two evaluations. `of` maps
    the role of each pool's members (verifier or drafter) to the pool's `Memory`."""

    of: dict[MemberRole, Memory] = field(
        default_factory=lambda: {role: Memory() for role in MemberRole}
    )

    def note(
        self, pools: Mapping[MemberRole, PoolState], config: AutoscaleConfig, now: float
    ) -> None:
        """Update for each pool since when it has been overloaded or underused. `now` is the present
        time in seconds."""
        for role, pool in pools.items():
            memory = self.of[role]
            memory.hot_since = _since(memory.hot_since, is_hot(pool, config), now)
            memory.cold_since = _since(memory.cold_since, is_cold(pool, config), now)

    def changed(self, role: MemberRole, now: float) -> None:
        """Record that the size of the pool of `role` changed at time `now`, and forget since when
        the pool was overloaded or underused."""
        self.of[role] = Memory(changed_at=now)


def plan_scaling(state: PoolState, config: AutoscaleConfig, now: float) -> Action | None:
    """Return the member to add to or to remove from a pool now, as `Create` or `Drain`, or None if
    the pool stays as it is. `now` is the present time in seconds, on the clock of the times in
    `state`."""
    steady = all(each.ready and not each.leaving for each in state.members)
    cooling = state.changed_at is not None and now - state.changed_at < config.cool_down_s
    if not steady or cooling:
        return None
    if _lasts(state.hot_since, config.up_after_s, now) and len(state.members) < state.max_members:
        return Create(_next_member(state))
    spare = [each for each in state.members if each.member.index >= state.min_members]
    if _lasts(state.cold_since, config.down_after_s, now) and spare:
        # The member with the fewest sessions; among equals the one added last.
        idlest = min(spare, key=lambda each: (each.sessions, -each.member.index))
        return Drain(idlest.member)
    return None


def is_hot(state: PoolState, config: AutoscaleConfig) -> bool:
    """Return whether a pool needs one more member."""
    ready = [each for each in state.members if each.ready and not each.leaving]
    if not ready:
        return False
    queue = state.waiting / len(ready)
    return queue >= config.queue_per_verifier or _mean_load(ready) >= config.high_load


def is_cold(state: PoolState, config: AutoscaleConfig) -> bool:
    """Return whether one member fewer would suffice."""
    ready = [each for each in state.members if each.ready and not each.leaving]
    if state.waiting or len(ready) < 2:
        return False
    return _mean_load(ready) * len(ready) / (len(ready) - 1) <= config.low_load


def _mean_load(members: list[MemberLoad]) -> float:
    return sum(each.load for each in members) / len(members)


def _next_member(state: PoolState) -> FleetMember:
    taken = {each.member.index for each in state.members}
    free = next(index for index in range(len(taken) + 1) if index not in taken)
    return FleetMember(state.role, free)


def _lasts(since: float | None, at_least_s: float, now: float) -> bool:
    return since is not None and now - since >= at_least_s


def _since(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
