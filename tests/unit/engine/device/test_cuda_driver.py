"""What a launching thread asks of the driver, by a driver that only takes notes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.device.transfer import cuda_driver
from outrider.engine.device.transfer.cuda_driver import (
    DriverCalls,
    DriverError,
    TorchCalls,
    driver_for,
)
from outrider.engine.device.transfer.uploads import StagingMemory, StagingPool, upload_int32s

CPU = torch.device("cpu")
STREAM = 77
NOT_READY, LAUNCH_FAILED = 600, 719


class Library:
    """Notes each call, and answers with the code that is set for its name, 0 without one."""

    def __init__(self, codes: dict[str, int], calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._codes, self._calls = codes, calls

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self._calls.append((name, given))
            return self._codes.get(name, 0)

        self.__dict__[name] = call
        return call


class Noted:
    """Calls by a driver that takes notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: dict[str, int] = {}
        self.kept: list[tuple[str, tuple[Any, ...]]] = []
        """Under the interpreter lock."""
        self.released: list[tuple[str, tuple[Any, ...]]] = []
        monkeypatch.setattr(ctypes, "PyDLL", lambda _: Library(self.codes, self.kept))
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(self.codes, self.released))
        monkeypatch.setattr(cuda_driver, "current_stream", lambda: STREAM)
        self.calls = DriverCalls()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


def test_a_launch_and_a_copy_keep_the_lock_and_go_to_the_current_stream(noted: Noted) -> None:
    to, source = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    noted.calls.launch(5)
    noted.calls.copy_tensor(to, source)
    assert noted.kept == [
        ("cuGraphLaunch", (5, STREAM)),
        ("cuMemcpyAsync", (to.data_ptr(), source.data_ptr(), 12, STREAM)),
    ]
    assert not noted.released


def test_a_copy_with_gaps_is_left_to_torch(noted: Noted) -> None:
    to, source = torch.zeros(3, dtype=torch.int32), torch.arange(6, dtype=torch.int32)[::2]
    noted.calls.copy_tensor(to, source)
    assert not noted.kept and to.tolist() == [0, 2, 4]


def test_only_waiting_for_the_device_gives_the_lock_up(noted: Noted) -> None:
    mark = noted.calls.make_event()
    mark.record()
    noted.codes["cuEventQuery"] = NOT_READY
    assert not mark.is_complete
    mark.wait()
    assert [name for name, _ in noted.released] == ["cuEventSynchronize"]
    noted.codes["cuEventQuery"] = 0
    assert mark.is_complete
    mark.wait()
    assert len(noted.released) == 1


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("cuGraphLaunch", lambda calls: calls.launch(5)),
        ("cuMemcpyAsync", lambda calls: calls.copy_tensor(torch.zeros(1), torch.ones(1))),
        ("cuEventCreate", lambda calls: calls.make_event()),
        ("cuEventRecord", lambda calls: calls.make_event().record()),
        ("cuEventQuery", lambda calls: calls.make_event().wait()),
    ],
)
def test_a_call_that_fails_raises_and_says_which(
    noted: Noted, name: str, use: Callable[[DriverCalls], object]
) -> None:
    noted.codes[name] = LAUNCH_FAILED
    with pytest.raises(DriverError, match=f"{name}: CUDA error {LAUNCH_FAILED}"):
        use(noted.calls)


def test_without_a_driver_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ctypes, "PyDLL", absent)
    cuda_driver.cuda_interface.cache_clear()
    assert isinstance(driver_for(torch.device("cuda", 0)), TorchCalls)
    cuda_driver.cuda_interface.cache_clear()
    to = torch.zeros(2)
    driver_for(CPU).copy_tensor(to, torch.ones(2))
    assert to.tolist() == [1.0, 1.0]


class Copying:
    """The end of a copy, for the test to say."""

    def __init__(self) -> None:
        self.is_complete = True

    def record(self) -> None:
        """A copy has begun."""
        self.is_complete = False

    def wait(self) -> None:
        """Nobody does."""
        raise AssertionError("an upload waited")


def test_staging_memory_is_used_again_once_the_copy_from_it_is_over() -> None:
    made: list[StagingMemory] = []
    copies: list[Copying] = []

    def make(_: torch.device, size: int) -> StagingMemory:
        tensor = torch.zeros(size, dtype=torch.int32)
        copies.append(Copying())
        made.append(StagingMemory(CPU, tensor, tensor.numpy(), copies[-1]))
        return made[-1]

    pool = StagingPool(make)

    def use(count: int) -> StagingMemory:
        taken = pool.take(CPU, count)
        taken.free.record()
        pool.give_back(taken)
        return taken

    for count in (3, 256, 1):
        use(count)
    assert len(made) == 3 and {len(each.array) for each in made} == {256}
    copies[0].is_complete = True
    assert use(200) is made[0]
    assert len(use(257).array) == 512
    assert len(made) == 4
    # What one has taken, nobody else is given.
    for copy in copies:
        copy.is_complete = True
    assert pool.take(CPU, 1) is not pool.take(CPU, 1)


def test_a_copy_to_another_size_is_refused(noted: Noted) -> None:
    with pytest.raises(ValueError, match="12 bytes to 8"):
        noted.calls.copy_tensor(torch.zeros(2), torch.ones(3))
    assert not noted.kept


def test_who_asks_from_another_device_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(cuda_driver, "cuda_interface", lambda: "the driver")
    assert isinstance(driver_for(torch.device("cuda", 0)), TorchCalls)
    assert driver_for(torch.device("cuda", 1)) == driver_for(torch.device("cuda")) == "the driver"


def test_an_upload_of_nothing_copies_nothing() -> None:
    upload_int32s(torch.zeros(0, dtype=torch.int32), np.zeros(0, dtype=np.int32))
