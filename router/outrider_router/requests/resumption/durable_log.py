"""Durable log of resumable requests: the file from which a restarted router resumes them.

The event loop appends the tokens of a round with one `write` for all sessions, before any client
gets them. So every token that a client has seen survives a crash of the router process. `Fsync`
sets when the data is flushed to the disk. The file is rewritten when it has grown too long, and
after a failure. The new file omits requests that cannot be resumed any more. Until a rewrite after
a failure succeeds, the router serves without a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import FailedPreconditionError
from outrider.wire.inference import FinishInfo
from outrider.wire.logprobs import TokenLogprobs
from outrider_router.config import Fsync
from outrider_router.requests.resumption.log_records import (
    HEADER,
    MAX_NUMBER,
    EmittedRow,
    LogContents,
    LoggedRequest,
    OpenedRequest,
    decode_log,
    encode_emitted,
    encode_ended,
    encode_file,
    encode_opened,
    encode_tick,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Time in seconds between two checks that flush the file, limit its length, or retry after a
failure.
"""
MIN_BYTES = 4 << 20
"""Length in bytes below which the file is never rewritten."""
MAX_FILE_BYTES = 512 << 20
"""Largest number of bytes of a file that is read at the start. Files that routers write are far
shorter.
"""
REWRITE_FACTOR = 4
"""The file is rewritten when it is this many times as long as after the last rewrite."""


@dataclass(slots=True)
class _LoggedRequest:
    """A request that the next rewrite of the log keeps."""

    opened: bytes
    emitted: list[int]
    """Emitted token ids: the request's own list, which grows."""
    logprobs: list[TokenLogprobs]
    """Log-probabilities of the emitted tokens: the request's own list, which grows."""
    cached_tokens: int = 0
    """Number of prompt tokens found in a prefix cache (`RequestOutput.cached_tokens`)."""
    ended: bytes = b""


class DurableLog:
    """Durable log of the resumable requests of one router. Use from one event loop."""

    def __init__(
        self,
        path: Path,
        *,
        fsync: Fsync,
        wall: Callable[[], float],
        on_failing: Callable[[bool], None] = lambda failing: None,
        read_s: float = math.inf,
    ) -> None:
        """Lock the file and read it, for at most `read_s` seconds. Nothing is written before
        `start_writing`.

        `wall` returns wall-clock time in seconds. `on_failing` is called with True when the log
        cannot be written, and with False when it can be again. If the file cannot be locked, read
        or written, the router serves without a log, as after a later disk failure. Raises
        FailedPreconditionError (JOURNAL_LOCKED) if another router uses the file.
        """
        self.path = path
        self._fsync = fsync
        self._wall = wall
        self._on_failing = on_failing
        self._live: dict[int, _LoggedRequest] = {}
        self._fd = -1
        self._size = self._size_at_first = 0
        self._failing = False
        self._meanwhile: list[bytes] | None = None
        """Data that is written while the file is being rewritten; None otherwise."""
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = -1
        self.contents = LogContents()
        try:
            self._take_lock()
        except OSError as error:
            self._fail(error)
        try:
            self.contents = _read_file(path, time.monotonic() + read_s)
        except OSError as error:
            self._fail(error)
        self._last_number = self.contents.last_number

    @property
    def is_failing(self) -> bool:
        """Whether the log cannot be written now, so that clients receive tokens that are not in the
        log.
        """
        return self._failing

    def start_writing(self) -> None:
        """Rewrite the file with only the restored requests, and append to it from then on."""
        if not self._failing:
            try:
                self._start_anew(self._write_new(self._snapshot()), b"")
            except OSError as error:
                self._fail(error)
        self._task = asyncio.create_task(self._run(), name="journal")

    async def close(self) -> None:
        """Stop writing and close the file, which is kept. Idempotent."""
        self._stop.set()
        if self._task is not None:
            await self._task
        if self._fd >= 0:
            if self._fsync is not Fsync.OFF and not self._failing:
                with contextlib.suppress(OSError):
                    os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def restore_request(self, logged: LoggedRequest) -> None:
        """Keep in the log a request that was read from the file. Its lists `emitted` and `logprobs`
        must be the ones to which new tokens are appended.
        """
        live = _LoggedRequest(
            encode_opened(logged.number, logged.opened),
            logged.emitted,
            logged.logprobs,
            logged.cached_tokens,
        )
        if logged.finish is not None:
            live.ended = encode_ended(logged.number, logged.ended_at, logged.finish)
        self._live[logged.number] = live

    def append_opened(
        self, opened: OpenedRequest, emitted: list[int], logprobs: list[TokenLogprobs]
    ) -> int:
        """Log a new request and return its number. `emitted` and `logprobs` must be the lists to
        which new tokens of the request are appended.
        """
        self._last_number = self._last_number % MAX_NUMBER + 1
        while self._last_number in self._live:
            self._last_number = self._last_number % MAX_NUMBER + 1
        live = self._live[self._last_number] = _LoggedRequest(
            encode_opened(self._last_number, opened), emitted, logprobs
        )
        self._write(live.opened)
        return self._last_number

    def append_emitted(self, rows: Sequence[EmittedRow]) -> None:
        """Log new token ids of requests, before any client receives them."""
        for row in rows:
            if row.cached_tokens and row.number in self._live:
                self._live[row.number].cached_tokens = row.cached_tokens
        self._write(encode_emitted(rows))

    def append_ended(self, number: int, finish: FinishInfo | None) -> None:
        """Log the end of a request. With a `finish`, the log keeps the request until
        `forget_request` is called; without one, the request is forgotten at once.
        """
        live = self._live.get(number)
        if live is None:
            return
        live.ended = encode_ended(number, self._wall(), finish)
        self._write(live.ended)
        if finish is None:
            self.forget_request(number)

    def forget_request(self, number: int) -> None:
        """Omit a request from the file when it is rewritten next."""
        self._live.pop(number, None)

    def _write(self, data: bytes) -> None:
        if self._meanwhile is not None:
            self._meanwhile.append(data)
        if self._failing or self._fd < 0:
            return
        try:
            _write_all(self._fd, data)
            if self._fsync is Fsync.ALWAYS:
                os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)
        self._size += len(data)

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            logger.error(
                "journal failed; serving without it",
                extra={"journal": str(self.path), "why": str(error)},
            )
            self._failing = True
            self._on_failing(True)

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._stop.wait()
            except TimeoutError:
                await self._tick()

    async def _tick(self) -> None:
        if self._live:
            self._write(encode_tick(self._wall()))
        try:
            if self._failing or self._size > max(MIN_BYTES, REWRITE_FACTOR * self._size_at_first):
                await self._renew()
            elif self._fsync is Fsync.INTERVAL:
                await asyncio.to_thread(os.fdatasync, self._fd)
        except (OSError, FailedPreconditionError) as error:
            self._fail(error)

    async def _renew(self) -> None:
        """Rewrite the file in a thread, and append the data that is written meanwhile. The new file
        omits requests that have ended without a finish or were forgotten.
        """
        self._take_lock()
        self._meanwhile = []
        try:
            fd = await asyncio.to_thread(self._write_new, self._snapshot())
            self._start_anew(fd, b"".join(self._meanwhile))
        finally:
            self._meanwhile = None
        if self._failing:
            logger.warning("journal recovered", extra={"bytes": self._size})
            self._failing = False
            self._on_failing(False)

    def _take_lock(self) -> None:
        """Lock the file unless it is locked already. Raises OSError, and FailedPreconditionError if
        another router holds the lock.
        """
        if self._lock < 0:
            self._lock = _locked(self.path)

    def _snapshot(self) -> bytes:
        records = [encode_tick(self._wall())]
        for number, live in self._live.items():
            row = EmittedRow(number, 0, live.emitted, live.logprobs, live.cached_tokens)
            said = encode_emitted([row])
            records += (live.opened, said, live.ended)
        return encode_file(records)

    def _write_new(self, data: bytes) -> int:
        fd = os.open(self._new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data)
            # Otherwise a machine crash could leave the new file without its content.
            if self._fsync is not Fsync.OFF:
                os.fdatasync(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _start_anew(self, fd: int, more: bytes) -> None:
        try:
            _write_all(fd, more)
            if more and self._fsync is Fsync.ALWAYS:
                os.fdatasync(fd)
            os.replace(self._new_path, self.path)
        except OSError:
            os.close(fd)
            raise
        if self._fsync is not Fsync.OFF:
            _sync_folder(self.path.parent)
        old, self._fd = self._fd, fd
        if old >= 0:
            os.close(old)
        self._size = self._size_at_first = os.lseek(fd, 0, os.SEEK_CUR)

    @property
    def _new_path(self) -> Path:
        return self.path.with_name(self.path.name + ".new")


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, data[written:])


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _locked(path: Path) -> int:
    """Lock a file and return the descriptor that holds the lock while it is open. The lock has a
    separate file, because the log itself is replaced at each rewrite.
    """
    name = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        _check_unlocked(name)
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise _locked_error(name) from None
    return fd


def _check_unlocked(name: Path) -> None:
    """Raise FailedPreconditionError if another router holds this lock file, which this process
    cannot open for writing.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _locked_error(name) from None
    finally:
        os.close(fd)


def _locked_error(name: Path) -> FailedPreconditionError:
    journal = name.with_name(name.name.removesuffix(".lock"))
    return FailedPreconditionError(
        f"the journal {journal} is in use by another running router", reason="JOURNAL_LOCKED"
    )


def _read_file(path: Path, until: float) -> LogContents:
    """Read the contents of a file until `until`, a time of the monotonic clock in seconds."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return LogContents()
    if not data.startswith(HEADER):
        if data:
            aside = path.with_name(path.name + ".unreadable")
            os.replace(path, aside)
            logger.error("journal of another version moved aside", extra={"as": str(aside)})
        return LogContents()
    contents = decode_log(data, is_late=lambda: time.monotonic() >= until)
    if contents.unread_bytes:
        logger.error(
            "journal read timed out; the rest was dropped",
            extra={"unread_bytes": contents.unread_bytes},
        )
    if contents.num_damaged:
        logger.error("damaged journal records skipped", extra={"skipped": contents.num_damaged})
    if contents.is_torn:
        logger.warning("incomplete last journal record dropped")
    return contents
