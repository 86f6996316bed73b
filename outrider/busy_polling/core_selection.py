"""Selection of the CPU cores that a process keeps busy-polling. The functions do no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


def check_request(count: int, device: str) -> None:
    """Raise ValueError if `count` is negative, or if it is positive and the model runs on the CPU.

    A model on the CPU computes on all cores, so none of them can be busy-polling.
    """
    if count < 0:
        raise ValueError("busy_polling_cores must not be negative")
    if count and device == "cpu":
        raise ValueError(
            "busy_polling_cores needs an accelerator: a model on the CPU computes on all cores"
        )


def claim_order(allowed: Iterable[int], siblings: Mapping[int, Set[int]]) -> list[int]:
    """Return the allowed cores in the order in which they are claimed.

    The highest number comes first, because interrupts tend to use the lowest cores. The second
    hardware threads of physical cores come after the first hardware threads of all cores.
    `siblings` maps a core to all hardware threads of its physical core. A core without an entry has
    no siblings.
    """
    first: list[int] = []
    second: list[int] = []
    used: set[int] = set()
    for core in sorted(allowed, reverse=True):
        (second if core in used else first).append(core)
        used |= siblings.get(core, frozenset()) | {core}
    return first + second


def parse_core_list(text: str) -> frozenset[int]:
    """Return the cores named in the kernel's list format, such as "0-3,8". Raises ValueError for
    any other text."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores.update(range(int(low), int(high or low) + 1))
    return frozenset(cores)
