"""How single rows are multiplied fastest on this processor, found by a short measurement.

What wins differs between processors: on an AMD EPYC oneDNN's packed layout takes half the time of
a plain product even for one row, if that is padded to four; on an Intel Xeon a plain product of
one row is a third faster than that. So what single rows take is chosen where a weight is loaded,
by its shape; several rows take the packed product, which won wherever it was measured. The
measurement takes some tens of milliseconds a shape, more where other processes disturb it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

SAMPLE_BYTES: Final = 32 << 20
"""Weights that one measurement reads in turn: more than a core's own caches hold."""
WORTH_BYTES: Final = 1 << 20
"""Smaller weights stay in the caches, and no choice matters much."""
REPEATS: Final = 7
"""At least; then until nothing has become clearly faster for SETTLED turns: other processes load
their models at the same time."""
SETTLED: Final = 4
SETTLED_GAIN: Final = 0.99
BUDGET_S: Final = 0.6
"""For one shape; an undisturbed measurement takes a tenth of it."""
MARGIN: Final = 0.97
"""What replaces the habit must take at most this share of its time: noise decides nothing."""
STRONG_MARGIN: Final = 0.8
"""The same for fewer threads than there are cores, which is rarely right."""
MEMORY_SHARE: Final = 0.25
"""Of the memory available, what the plain copies of a model may take beside its packed ones."""

Product = Callable[[Tensor], Tensor]
MakeProduct = Callable[[Tensor], Product]


class Single(StrEnum):
    """How a product of one row is taken."""

    PADDED = "padded"
    """Packed, padded to as many rows as the packed product likes."""
    PACKED = "packed"
    PLAIN = "plain"
    """Over a plain copy of the weight, kept beside the packed one."""


Timings = Mapping[str, float]
_timings: dict[tuple[tuple[int, int], torch.dtype], Timings] = {}
_chosen: dict[str, str] = {}


def choices() -> dict[str, str]:
    """What was measured so far in this process: "OUTxIN float32" -> how single rows
    are multiplied."""
    return dict(_chosen)


def choose(seconds: Timings, *, keep_plain: bool) -> Single:
    """The product for single rows, by the `seconds` it takes under each of Single's values.

    The habit, padding, stands unless something else is clearly faster. A plain copy beside the
    packed one is taken only where `keep_plain` allows it.
    """
    best = Single.PADDED
    for other in (Single.PACKED, Single.PLAIN):
        if other is Single.PLAIN and not keep_plain:
            continue
        if seconds[other] < MARGIN * seconds[best]:
            best = other
    return best


def measure(
    shape: tuple[int, int], dtype: torch.dtype, make: Mapping[str, MakeProduct]
) -> dict[str, float]:
    """Seconds that a product of one row and `shape` [out, in] takes, by name of `make`.

    The makers run in turn, several times, over weights that no cache of a core holds together;
    each weight's least time counts, for what disturbs a measurement only makes it longer.
    """
    width = shape[1]
    out = min(shape[0], max(1, SAMPLE_BYTES // (width * dtype.itemsize)))
    copies = max(1, SAMPLE_BYTES // (out * width * dtype.itemsize))
    weight = torch.full((out, width), 0.5, dtype=dtype)
    layers = {name: [maker(weight.clone()) for _ in range(copies)] for name, maker in make.items()}
    # By one thread: where another process takes a core, all threads of a product wait for the one
    # that lost it, and what was disturbed least would win.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _least_seconds(layers, torch.ones((1, width), dtype=dtype))
    finally:
        torch.set_num_threads(threads)


def _least_seconds(layers: Mapping[str, list[Product]], x: Tensor) -> dict[str, float]:
    """The mean over each list of the least time that its products took."""
    least = {name: [math.inf] * len(products) for name, products in layers.items()}
    began = time.perf_counter()
    turns = settled = 0
    while turns < REPEATS or settled < SETTLED:
        turns, settled = turns + 1, settled + 1
        for name, products in layers.items():
            before = sum(least[name])
            least[name] = list(map(min, least[name], _seconds(products, x)))
            if sum(least[name]) < SETTLED_GAIN * before:
                settled = 0
        if turns > 1 and time.perf_counter() - began > BUDGET_S:
            break
    return {name: sum(times) / len(times) for name, times in least.items()}


def _seconds(products: list[Product], x: Tensor) -> list[float]:
    times = []
    for product in products:
        began = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - began)
    return times


def measured(
    shape: tuple[int, int], dtype: torch.dtype, make: Mapping[str, MakeProduct], *, keep_plain: bool
) -> Single:
    """The choice for a weight of `shape`: measured once a process, the habit for small ones.

    Only float32 is measured. In bfloat16 another order of summation flips many near ties; there
    plain and speculative decoding should see the very same products.
    """
    if dtype != torch.float32 or shape[0] * shape[1] * dtype.itemsize < WORTH_BYTES:
        return Single.PADDED
    name = f"{shape[0]}x{shape[1]} float32"
    if (shape, dtype) not in _timings:
        with torch.inference_mode():
            _timings[shape, dtype] = measure(shape, dtype, make)
    choice = choose(_timings[shape, dtype], keep_plain=keep_plain)
    _chosen[name] = str(choice)
    return choice


def room_for_copies(num_bytes: int) -> bool:
    """Whether plain copies of `num_bytes` may be kept beside the packed weights."""
    available = _available_bytes()
    return available is not None and num_bytes <= MEMORY_SHARE * available


def _available_bytes() -> int | None:
    """Memory that this process may still take, container limits included; None: not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(s.split()[1]) << 10 for s in lines if s.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        return min(available, limit - used)
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return available


@functools.cache
def fastest_threads(most: int) -> int:
    """How many threads of 1, 2, 4 .. `most` read weights fastest; `most` unless another is clearly
    faster (a container with fewer CPUs than it sees, cores that share their bandwidth)."""
    counts = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}, reverse=True)
    before = torch.get_num_threads()
    weight = torch.full((SAMPLE_BYTES >> 12, 1024), 0.5)
    x = torch.ones((1, 1024))
    product = functools.partial(F.linear, weight=weight)
    best = dict.fromkeys(counts, math.inf)
    try:
        with torch.inference_mode():
            for _ in range(REPEATS):
                for count in counts:
                    torch.set_num_threads(count)
                    product(x)  # threads start with the first product that uses them
                    best[count] = min(best[count], *_seconds([product] * 3, x))
    finally:
        torch.set_num_threads(before)
    chosen = counts[0]
    for count in counts[1:]:
        if best[count] < STRONG_MARGIN * best[chosen]:
            chosen = count
    return chosen


def set_threads(wanted: int, device: str) -> None:
    """Set torch's compute threads: `wanted`, or where that is 0 and models compute on the CPU, as
    many as were measured to be fastest."""
    if wanted:
        torch.set_num_threads(wanted)
    elif torch.device(device).type == "cpu":
        torch.set_num_threads(fastest_threads(torch.get_num_threads()))
