"""Fake device of the host benchmarks with prepared results, and the step timer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider_bench.report import format_table

T = TypeVar("T")

BESIDE: Final = " (beside)"


class Steps:
    """Timer of the steps of a round, by name of the step. Times are microseconds of the thread's
    processor time."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)
        self._round: dict[str, float] = {}
        self._last = 0

    def begin(self) -> None:
        """Begin to time the first of several consecutive steps."""
        self._last = time.thread_time_ns()

    def mark(self, name: str) -> None:
        """Record that the step `name` ends now and that the next one begins."""
        now = time.thread_time_ns()
        self._round[name] = self._round.get(name, 0.0) + (now - self._last) / 1e3
        self._last = time.thread_time_ns()

    def end_round(self) -> None:
        """Store the times of the steps since the last round."""
        for name, taken in self._round.items():
            self.taken[name].append(taken)
        self._round.clear()

    def mean(self, name: str) -> float:
        """Return the mean microseconds of a step per round, including rounds without this step."""
        rounds = max(map(len, self.taken.values()))
        return sum(self.taken[name]) / rounds

    def lowest(self, name: str) -> float:
        """Return the mean microseconds of a step in the tenth of the rounds in which it was
        fastest."""
        taken = sorted(self.taken[name])
        return float(np.mean(taken[: max(1, len(taken) // 10)]))


def steps_table(found: Mapping[str, Steps]) -> str:
    """Return a table of microseconds with a column for each entry of `found`. It has a row for each
    step and a row for a whole round of the verifier."""
    names = list(dict.fromkeys(name for steps in found.values() for name in steps.taken))
    rows = [[name, *(f"{steps.lowest(name):.0f}" for steps in found.values())] for name in names]
    totals = (sum(map(steps.lowest, names)) for steps in found.values())
    rows.append(["**verifier**", *(f"{total:.0f}" for total in totals)])
    return format_table(["us", *found], rows)


class CannedGraphs:
    """Fake `GraphCache` that runs nothing. It creates one result for each key and returns it again
    and again."""

    enabled = False
    sealed = True

    def __init__(self, make: Callable[[Any], Any], launched: Callable[[], None]) -> None:
        self._make, self._launched = make, launched
        self._made: dict[Hashable, Any] = {}

    def run_graph(self, key: Hashable, fn: Callable[[], T]) -> T:
        """Return the prepared result of a key, without a call of `fn`."""
        self._launched()
        if key not in self._made:
            self._made[key] = self._make(key)
        result: T = self._made[key]
        return result


class CannedCalls:
    """Fake `DriverInterface` that copies nothing."""

    def copy_array(self, to: Tensor, source: np.ndarray[Any, Any]) -> None:
        """Check that both sizes are equal, and copy nothing."""
        assert to.nbytes == source.nbytes


class CannedReadback:
    """Fake `PendingDownload` whose tensor is on the host already."""

    def __init__(self, tensor: Tensor, arrived: Callable[[], None]) -> None:
        self._tensor, self._arrived = tensor, arrived
        bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        self._array = bits.numpy()

    @property
    def has_arrived(self) -> bool:
        """True, because the data is on the host from the start."""
        return True

    def wait_tensor(self) -> Tensor:
        """Return the tensor."""
        self._arrived()
        return self._tensor

    def wait_array(self) -> np.ndarray[Any, Any]:
        """Return the data as a numpy array."""
        self._arrived()
        return self._array


class CannedLanding:
    """Fake `DownloadBuffer` whose copies are always complete."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived

    def wait_copy(self, like: Tensor) -> Tensor:
        """Return the tensor, which is on the host already."""
        self._arrived()
        return like


class CannedDownloads:
    """Fake `Downloader` that copies nothing."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived

    def start_download(self, tensor: Tensor, part: int = 0) -> CannedReadback:
        """Return a download that has already arrived."""
        return CannedReadback(tensor, self._arrived)

    def start_downloads(
        self,
        tensors: tuple[Tensor, ...],
        part: int = 0,
        *,
        last_into: np.ndarray[Any, Any] | None = None,
    ) -> list[CannedReadback]:
        """Return downloads that have already arrived. If `last_into` is given, the last download
        contains its data."""
        found = [self.start_download(tensor) for tensor in tensors]
        if last_into is not None:
            like = tensors[-1]
            there = torch.from_numpy(last_into).view(like.dtype).view(like.shape)
            found[-1] = CannedReadback(there, self._arrived)
        return found
