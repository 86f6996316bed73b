"""Selection of the fastest matrix product for a single float32 row on this CPU.

The fastest product differs between processors. On an AMD EPYC oneDNN's packed layout, padded to
four rows, takes half the time of a plain product; on an Intel Xeon with AVX-512 a plain product
takes three quarters of the time of a padded one (decision 0006). The choice depends only on the
weight's shape and the kind of processor. All processes on machines of the same kind therefore use
the same product at every start, and the same rows give the same bits. Two or more rows are always
multiplied by the packed product, which was the fastest on every CPU measured.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SAMPLE_BYTES: Final = 32 << 20
"""Bytes of the weight with which `fastest_threads` measures. It is larger than the caches of a
core."""
MIN_CHOICE_BYTES: Final = 1 << 20
"""Minimum bytes of a weight for which `choose_single` considers products other than the padded
one."""
MIN_REPEATS: Final = 7
"""Number of times that `fastest_threads` measures each number of threads."""
STRICT_TIME_SHARE: Final = 0.8
"""`fastest_threads` prefers a smaller number of threads only if its time is less than this share of
the time of the larger number."""
MAX_COPIES_SHARE: Final = 0.125
"""Largest share of the machine's memory that the plain copies of one model's weights may take."""

Product = Callable[[Tensor], Tensor]


class SingleRowMethod(StrEnum):
    """Method of multiplying a single row by a weight."""

    PADDED = "padded"
    """Product with the packed weight, for which the row is padded to
    `outrider.engine.linear.MIN_ROWS` rows."""
    PACKED = "packed"
    PLAIN = "plain"
    """Product with a plain copy of the weight, kept in addition to the packed weight."""


class Processor(NamedTuple):
    """Processor properties on which the choice of the product depends."""

    vendor: str
    """Vendor as /proc/cpuinfo names it, such as "GenuineIntel"; empty if unknown."""
    has_avx512: bool

    def __str__(self) -> str:
        return f"{self.vendor or 'unknown'}{' avx512' if self.has_avx512 else ''}"


_INTEL_AVX512: Final = Processor("GenuineIntel", has_avx512=True)
_chosen: dict[str, str] = {}


@functools.cache
def this_processor() -> Processor:
    """Return the properties of the processor that this process runs on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return Processor("", has_avx512=False)
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> Processor:
    """Return the properties of the first core in `text`, the content of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return Processor(facts.get("vendor_id", ""), "avx512f" in facts.get("flags", "").split())


def choose_single(
    shape: tuple[int, int], dtype: torch.dtype, processor: Processor, *, keep_plain: bool
) -> SingleRowMethod:
    """Return the product for single rows of a weight of `shape` [out, in].

    `keep_plain` allows a plain copy in addition to the packed weight. bfloat16 rows are always
    padded, because another order of summation would change many near ties.
    """
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if dtype != torch.float32 or num_bytes < MIN_CHOICE_BYTES or processor != _INTEL_AVX512:
        return SingleRowMethod.PADDED
    return SingleRowMethod.PLAIN if keep_plain else SingleRowMethod.PACKED


def record_choice(shape: tuple[int, int], dtype: torch.dtype, choice: SingleRowMethod) -> None:
    """Record the choice for a weight of `shape` [out, in], so that `measured_choices` returns
    it."""
    _chosen[f"{shape[0]}x{shape[1]} {str(dtype).removeprefix('torch.')}"] = str(choice)


def measured_choices() -> dict[str, str]:
    """Return the `SingleRowMethod` of each shape and dtype that this process has recorded. A key is
    "OUTxIN DTYPE", such as "4096x1024 float32"."""
    return dict(_chosen)


def has_memory_for_copies(num_bytes: int) -> bool:
    """Return whether plain copies of `num_bytes` may be kept beside the packed weights.

    The limit is the share MAX_COPIES_SHARE of all memory of the machine or container. Free memory
    does not count, because the choice must not differ between two starts.
    """
    total = total_memory_bytes()
    return total is not None and num_bytes <= MAX_COPIES_SHARE * total


def total_memory_bytes() -> int | None:
    """Return the memory of the machine, or the limit of the container if it is smaller. Return None
    if the memory is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        total = next(int(s.split()[1]) << 10 for s in lines if s.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return total


def _seconds(products: list[Product], x: Tensor) -> list[float]:
    times = []
    for product in products:
        began = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - began)
    return times


@functools.cache
def fastest_threads(most: int) -> int:
    """Measure a product with 1, 2, 4, .. and `most` threads, and return the fastest number of
    threads.

    Fewer threads are chosen only if they are clearly faster (`STRICT_TIME_SHARE`). This is so in a
    container with fewer CPUs than it sees, or on cores that share memory bandwidth.
    """
    counts = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}, reverse=True)
    before = torch.get_num_threads()
    weight = torch.full((SAMPLE_BYTES >> 12, 1024), 0.5)
    x = torch.ones((1, 1024))
    product = functools.partial(F.linear, weight=weight)
    best = dict.fromkeys(counts, math.inf)
    try:
        with torch.inference_mode():
            for _ in range(MIN_REPEATS):
                for count in counts:
                    torch.set_num_threads(count)
                    product(x)  # threads start with the first product that uses them
                    best[count] = min(best[count], *_seconds([product] * 3, x))
    finally:
        torch.set_num_threads(before)
    chosen = counts[0]
    for count in counts[1:]:
        if best[count] < STRICT_TIME_SHARE * best[chosen]:
            chosen = count
    return chosen


def set_compute_threads(wanted: int, device: str) -> None:
    """Set torch's number of compute threads to `wanted`. If `wanted` is 0 and the device is a CPU,
    set it to the measured `fastest_threads`."""
    if wanted:
        torch.set_num_threads(wanted)
    elif torch.device(device).type == "cpu":
        torch.set_num_threads(fastest_threads(torch.get_num_threads()))
