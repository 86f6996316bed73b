"""The journal's file: its lock, its length, what a full disk does to it."""

from __future__ import annotations

import asyncio
import os
import struct
import time
import zlib
from pathlib import Path

import pytest
from outrider_router.config import Fsync
from outrider_router.requests.resumption import durable_log
from outrider_router.requests.resumption.durable_log import DurableLog
from outrider_router.requests.resumption.log_records import (
    EMITTED,
    HEADER,
    MAX_REQUESTS,
    RECORD_MARK,
    EmittedRow,
    encode_file,
    encode_opened,
)
from outrider_router.requests.resumption.log_records import OPENED as OPENED_KIND

from outrider.errors import FailedPreconditionError
from tests.unit.router.requests.test_log_records import FINISH, OPENED
from tests.waiting import until


def open_log(
    path: Path,
    fsync: Fsync = Fsync.OFF,
    states: list[bool] | None = None,
    read_s: float = 60.0,
) -> DurableLog:
    failing = [] if states is None else states
    return DurableLog(
        path, fsync=fsync, wall=lambda: 1000.0, on_failing=failing.append, read_s=read_s
    )


def emit(log: DurableLog, number: int, emitted: list[int], new: list[int]) -> None:
    """As the sink does: log, and append."""
    start = len(emitted)
    emitted += new
    log.append_emitted([EmittedRow(number, start, new)])


@pytest.mark.parametrize("fsync", Fsync)
async def test_what_was_told_to_the_log_is_there_after_a_kill(tmp_path: Path, fsync: Fsync) -> None:
    path = tmp_path / "folder" / "log"
    log = open_log(path, fsync)
    log.start_writing()
    emitted: list[int] = []
    number = log.append_opened(OPENED, emitted, [])
    emit(log, number, emitted, [1, 2])
    emit(log, number, emitted, [3])
    # What a killed process leaves is the file as it is now.
    killed = tmp_path / "killed"
    killed.write_bytes(path.read_bytes())
    await log.close()
    after = open_log(killed)
    (logged,) = after.contents.requests.values()
    assert (logged.opened, logged.emitted, logged.finish) == (OPENED, [1, 2, 3], None)
    after.restore_request(logged)
    after.start_writing()
    emit(after, logged.number, logged.emitted, [4])
    other = after.append_opened(OPENED, [], [])
    assert other > logged.number
    after.append_ended(logged.number, FINISH)
    await after.close()
    again = open_log(killed)
    assert again.contents.requests[logged.number].emitted == [1, 2, 3, 4]
    assert again.contents.requests[logged.number].finish == FINISH
    await again.close()


async def test_two_routers_never_share_a_journal(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    with pytest.raises(FailedPreconditionError) as caught:
        open_log(tmp_path / "log")
    assert caught.value.reason == "JOURNAL_LOCKED"
    await log.close()
    await open_log(tmp_path / "log").close()


async def test_a_journal_that_cannot_be_had_is_served_without_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "CHECK_INTERVAL_S", 0.02)
    (tmp_path / "file").touch()
    states: list[bool] = []
    path = tmp_path / "file" / "log"
    log = open_log(path, states=states)
    log.start_writing()
    assert log.is_failing and states == [True] and log.contents.requests == {}
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("ERROR", "journal failed; serving without it")
    ]
    emitted: list[int] = []
    number = log.append_opened(OPENED, emitted, [])
    emit(log, number, emitted, [1, 2])
    (tmp_path / "file").unlink()
    await until(lambda: not log.is_failing)
    assert states == [True, False]
    with pytest.raises(FailedPreconditionError):
        open_log(path)
    await log.close()
    after = open_log(path)
    assert after.contents.requests[number].emitted == [1, 2]
    await after.close()


async def test_a_lock_that_cannot_be_written_still_tells_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path / "log")
    own_open = os.open

    def read_only(name: object, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return own_open(name, flags, *mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(FailedPreconditionError) as caught:
        open_log(tmp_path / "log")
    assert caught.value.reason == "JOURNAL_LOCKED"
    await log.close()
    after = open_log(tmp_path / "log")
    after.start_writing()
    assert after.is_failing
    await after.close()


@pytest.mark.parametrize("kind", ["marks", "nested", "rows", "requests"])
async def test_a_crafted_file_holds_the_start_no_longer_than_it_may(
    tmp_path: Path, kind: str
) -> None:
    """A head every 13 bytes, each of which claims all that follows, took 45 s for 4 MB."""
    path = tmp_path / "log"
    size = 8 << 20
    if kind == "marks":
        head = struct.Struct("<4sIIB")
        heads = (head.pack(RECORD_MARK, size - 13 * i, 1, EMITTED) for i in range(size // 13))
        data = HEADER + b"".join(heads) + bytes(size)
    elif kind == "nested":
        text = b"[" * (1 << 20)
        numbers = struct.pack("<II", 1, len(text))
        data = encode_file([framed(OPENED_KIND, numbers + text)] * 4)
    elif kind == "rows":
        rows = (size - 4) // 12
        data = encode_file([framed(EMITTED, struct.pack("<I", rows) + bytes(12 * rows))] * 4)
    else:
        data = encode_file([encode_opened(number, OPENED) for number in range(MAX_REQUESTS + 9)])
    path.write_bytes(data)
    began = time.monotonic()
    log = open_log(path, read_s=1.0)
    assert time.monotonic() - began < 3.0
    assert len(log.contents.requests) <= MAX_REQUESTS
    assert log.contents.num_damaged or log.contents.unread_bytes
    await log.close()


def framed(kind: int, body: bytes) -> bytes:
    crc = zlib.crc32(body, zlib.crc32(bytes((kind,))))
    return RECORD_MARK + struct.pack("<IIB", len(body), crc, kind) + body


async def test_a_file_of_something_else_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"something else")
    log = open_log(path)
    log.start_writing()
    await log.close()
    assert (tmp_path / "log.unreadable").read_bytes() == b"something else"


async def test_the_file_stays_short_and_complete_while_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(durable_log, "MIN_BYTES", 10_000)
    log = open_log(tmp_path / "log", Fsync.INTERVAL)
    log.start_writing()
    kept: list[int] = []
    number = log.append_opened(OPENED, kept, [])
    for turn in range(300):
        passing: list[int] = []
        short = log.append_opened(OPENED, passing, [])
        emit(log, short, passing, [turn] * 20)
        emit(log, number, kept, [turn])
        log.append_ended(short, None)
        # Writing it anew may take a while.
        await until(lambda: (tmp_path / "log").stat().st_size < 50_000)
    assert (tmp_path / "log").stat().st_size < 100_000
    await log.close()
    after = open_log(tmp_path / "log")
    assert {n: logged.emitted for n, logged in after.contents.requests.items()} == {
        number: list(range(300))
    }
    assert after.contents.num_damaged == 0
    await after.close()


async def test_a_full_disk_is_told_and_mended_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "CHECK_INTERVAL_S", 0.01)
    states: list[bool] = []
    log = open_log(tmp_path / "log", Fsync.INTERVAL, states)
    log.start_writing()
    emitted: list[int] = []
    number = log.append_opened(OPENED, emitted, [])
    emit(log, number, emitted, [1])
    write, full = os.write, True

    def torn(fd: int, data: bytes) -> int:
        if full and len(data) > 5:
            write(fd, data[:5])
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", torn)
    emit(log, number, emitted, [2, 3])
    assert log.is_failing and states == [True]
    emit(log, number, emitted, [4])
    await asyncio.sleep(0.05)
    assert states == [True]
    full = False
    await until(lambda: not log.is_failing)
    emit(log, number, emitted, [5])
    assert states == [True, False]
    await log.close()
    after = open_log(tmp_path / "log")
    assert after.contents.requests[number].emitted == [1, 2, 3, 4, 5]
    assert after.contents.num_damaged == 0
    await after.close()
