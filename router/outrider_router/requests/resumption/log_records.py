"""Record format of the durable log of resumable requests. Pure: no file, no clock.

    file   = HEADER, record, record, ...
    record = MARK, body length (u32), CRC-32 of kind and body (u32), kind (u8), body

A damaged record is detected by its checksum, and the next record is found by its mark. All numbers
are little-endian. Each request has a number in the log, so that the record of a round consists of
arrays only. Log-probabilities are written before the record of their token ids; token ids whose
log-probabilities are missing are ignored. The number of cached prompt tokens is written before a
request's first token ids, unless it is 0.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from outrider.config import from_plain
from outrider.errors import OutriderError
from outrider.ids import RequestId
from outrider.wire.inference import FinishInfo
from outrider.wire.logprobs import TokenLogprobs, pack_logprobs, unpack_logprobs
from outrider_router.requests.request import ValidatedRequest

HEADER = b"outrider journal 1\n"
RECORD_MARK = b"\xf7\x0dJ\x01"
_HEAD = struct.Struct("<4sIIB")
_NUMBER = struct.Struct("<I")
_CACHED = struct.Struct("<II")
_TIME = struct.Struct("<d")
OPENED, EMITTED, ENDED, TICK, LOGPROBS, CACHED = 1, 2, 3, 4, 5, 6


MAX_RECORD_BYTES = 32 << 20
"""Largest length of a record body in bytes; a longer one is damaged. A million token ids with
log-probabilities fit.
"""
MAX_ROWS = 1 << 16
"""Largest number of rows in one record of token ids; a round has fewer sessions."""
MAX_NUMBER = (1 << 31) - 1
"""Largest number of a request; the next number after it is 1."""
MAX_REQUESTS = 4096
"""Largest number of requests in a log; records of further requests count as damaged. A router keeps
at most the same number of finished answers.
"""


class EmittedRow(NamedTuple):
    """New token ids of one request."""

    number: int
    start: int
    """Number of token ids that the request emitted before."""
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities of each id, all with the same number of top ids; empty if the request has
    none.
    """
    cached_tokens: int = 0
    """Number of prompt tokens found in a prefix cache (`RequestOutput.cached_tokens`) if these are
    the first ids, else 0.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRequest:
    """A request as it was accepted."""

    request_id: RequestId
    job: ValidatedRequest
    deadline: float | None
    """Wall-clock time of the deadline in seconds; None if there is none."""
    tokenizer_hash: str
    """Hash of the tokenizer that produced the token ids."""


@dataclass(slots=True, kw_only=True)
class LoggedRequest:
    """One request as described by its records."""

    number: int
    opened: OpenedRequest
    emitted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of `emitted` if the request asked for them. The list may be longer than
    `emitted`.
    """
    cached_tokens: int = 0
    """Number of prompt tokens found in a prefix cache (`RequestOutput.cached_tokens`)."""
    finish: FinishInfo | None = None
    ended_at: float = 0.0
    """Wall-clock time of the finish in seconds."""


@dataclass(slots=True, kw_only=True)
class LogContents:
    """Contents of a log: the requests that have not ended, and those that ended with a finish."""

    requests: dict[int, LoggedRequest] = field(default_factory=dict)
    last_number: int = 0
    alive_at: float = 0.0
    """Latest wall-clock time in the records, in seconds. The router still ran at this time."""
    num_damaged: int = 0
    """Number of damaged records or parts of the file that were skipped."""
    is_torn: bool = False
    """Whether the last record is incomplete, as after a crash."""
    unread_bytes: int = 0
    """Number of bytes at the end that were not read because the time limit had passed."""


def encode_opened(number: int, opened: OpenedRequest) -> bytes:
    """Return the record of a request that begins."""
    job = asdict(replace(opened.job, prompt_ids=()))
    said = {
        "request_id": opened.request_id,
        "deadline": opened.deadline,
        "tokenizer": opened.tokenizer_hash,
        "job": job,
    }
    text = json.dumps(said, separators=(",", ":")).encode()
    prompt = np.array(opened.job.prompt_ids, dtype="<u4").tobytes()
    return _record(OPENED, _NUMBER.pack(number) + _NUMBER.pack(len(text)) + text + prompt)


def encode_emitted(rows: Sequence[EmittedRow]) -> bytes:
    """Return the records of new token ids of any number of requests, of their log-probabilities and
    of their numbers of cached tokens.
    """
    values = [len(rows)]
    for column in zip(*((row.number, row.start, len(row.ids)) for row in rows), strict=True):
        values += column
    for row in rows:
        values += row.ids
    record = _record(EMITTED, np.array(values, dtype="<u4").tobytes())
    cached = [
        _record(CACHED, _CACHED.pack(row.number, row.cached_tokens))
        for row in rows
        if row.cached_tokens
    ]
    logprobs = [_logprobs_record(row) for row in rows if row.logprobs]
    return b"".join([*cached, *logprobs, record])


def _logprobs_record(row: EmittedRow) -> bytes:
    values, top_ids = pack_logprobs(row.logprobs)
    width = len(values) // len(row.logprobs)
    head = np.array([row.number, row.start, len(row.logprobs), width, *top_ids], dtype="<u4")
    return _record(LOGPROBS, head.tobytes() + np.array(values, dtype="<f4").tobytes())


def encode_ended(number: int, at: float, finish: FinishInfo | None) -> bytes:
    """Return the record of a request that ended at the wall-clock time `at` in seconds. Without a
    finish, the log need not keep the request.
    """
    said = {"at": at, "finish": None if finish is None else asdict(finish)}
    text = json.dumps(said, separators=(",", ":")).encode()
    return _record(ENDED, _NUMBER.pack(number) + text)


def encode_tick(at: float) -> bytes:
    """Return a record which says that the router ran at the wall-clock time `at` in seconds."""
    return _record(TICK, _TIME.pack(at))


def encode_file(records: Iterable[bytes]) -> bytes:
    """Return the bytes of a file with these records."""
    return HEADER + b"".join(records)


def decode_log(data: bytes, *, is_late: Callable[[], bool] = lambda: False) -> LogContents:
    """Return the contents of a log from its bytes, which include the header. Damaged parts are
    skipped and never raise an error.

    `is_late` is called before every attempt to read a record. Once it returns True, the rest of the
    bytes is not read. This limits the time for bytes that were crafted to be slow to read.
    """
    contents = LogContents()
    for kind, body in _scan(data, contents, is_late):
        try:
            _FOLDS[kind](contents, body)
        except (
            OutriderError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
            struct.error,
        ):
            contents.num_damaged += 1
    return contents


def _record(kind: int, body: bytes) -> bytes:
    crc = zlib.crc32(body, zlib.crc32(bytes((kind,))))
    return _HEAD.pack(RECORD_MARK, len(body), crc, kind) + body


def _scan(
    data: bytes, contents: LogContents, is_late: Callable[[], bool]
) -> Iterator[tuple[int, bytes]]:
    """Yield the valid records. Invalid bytes between two of them count as damage; invalid bytes at
    the end count as an incomplete record.
    """
    at, clean = len(HEADER), True
    while at < len(data):
        if is_late():
            contents.unread_bytes = len(data) - at
            break
        record = _record_at(data, at)
        if record is None:
            clean = False
            found = data.find(RECORD_MARK, at + 1)
            at = found if found >= 0 else len(data)
            continue
        if not clean:
            contents.num_damaged += 1
            clean = True
        at += _HEAD.size + len(record[1])
        yield record
    contents.is_torn = not clean and not contents.unread_bytes


def _record_at(data: bytes, at: int) -> tuple[int, bytes] | None:
    if len(data) - at < _HEAD.size:
        return None
    mark, length, crc, kind = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    if mark != RECORD_MARK or length > min(MAX_RECORD_BYTES, len(data) - start):
        return None
    body = data[start : start + length]
    if zlib.crc32(body, zlib.crc32(bytes((kind,)))) != crc:
        return None
    return kind, body


def _fold_opened(contents: LogContents, body: bytes) -> None:
    number, length = _NUMBER.unpack_from(body)[0], _NUMBER.unpack_from(body, _NUMBER.size)[0]
    start = 2 * _NUMBER.size
    if number not in contents.requests and len(contents.requests) >= MAX_REQUESTS:
        raise ValueError(f"there are {MAX_REQUESTS} requests")
    if not 0 < number <= MAX_NUMBER:
        raise ValueError(f"numbers of requests are in [1, {MAX_NUMBER}], not {number}")
    contents.last_number = max(contents.last_number, number)
    said: dict[str, Any] = json.loads(body[start : start + length])
    prompt = np.frombuffer(body, dtype="<u4", offset=start + length)
    opened = OpenedRequest(
        request_id=RequestId(str(said["request_id"])),
        job=replace(from_plain(ValidatedRequest, said["job"]), prompt_ids=tuple(prompt.tolist())),
        deadline=None if said["deadline"] is None else float(said["deadline"]),
        tokenizer_hash=str(said["tokenizer"]),
    )
    contents.requests[number] = LoggedRequest(number=number, opened=opened)


def _fold_emitted(contents: LogContents, body: bytes) -> None:
    values = np.frombuffer(body, dtype="<u4").tolist()
    rows = values[0] if values else 0
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"a record of ids has 1 to {MAX_ROWS} rows, not {rows}")
    numbers, starts, counts = (values[1 + i * rows : 1 + (i + 1) * rows] for i in range(3))
    at = 1 + 3 * rows
    if len(values) != at + sum(counts):
        raise ValueError("a record of ids is not as long as it says")
    for number, start, count in zip(numbers, starts, counts, strict=True):
        tokens = values[at : at + count]
        at += count
        logged = contents.requests.get(number)
        # Ids after a gap (a damaged record) are dropped. A rewrite may repeat the last ids.
        if logged is not None and start <= len(logged.emitted):
            if logged.opened.job.top_logprobs is not None:
                del tokens[max(0, len(logged.logprobs) - start) :]
            logged.emitted[start:] = tokens


def _fold_logprobs(contents: LogContents, body: bytes) -> None:
    number, start, count, width = np.frombuffer(body, dtype="<u4", count=4).tolist()
    ids, total = count * (width - 1), count * width
    if width < 1 or len(body) != 4 * (4 + ids + total):
        raise ValueError("a record of log-probabilities is not as long as it says")
    top_ids = np.frombuffer(body, dtype="<u4", count=ids, offset=16).tolist()
    values = np.frombuffer(body, dtype="<f4", offset=4 * (4 + ids)).tolist()
    logged = contents.requests.get(number)
    if logged is not None and start <= len(logged.logprobs):
        logged.logprobs[start:] = unpack_logprobs(width, values, top_ids)


def _fold_cached(contents: LogContents, body: bytes) -> None:
    number, cached_tokens = _CACHED.unpack(body)
    logged = contents.requests.get(number)
    if logged is not None:
        if cached_tokens > len(logged.opened.job.prompt_ids):
            raise ValueError(f"the prompt has fewer than {cached_tokens} tokens")
        logged.cached_tokens = cached_tokens


def _fold_ended(contents: LogContents, body: bytes) -> None:
    (number,) = _NUMBER.unpack_from(body)
    said: dict[str, Any] = json.loads(body[_NUMBER.size :])
    at = float(said["at"])
    contents.alive_at = max(contents.alive_at, at)
    if said["finish"] is None:
        contents.requests.pop(number, None)
    elif number in contents.requests:
        logged = contents.requests[number]
        logged.finish, logged.ended_at = from_plain(FinishInfo, said["finish"]), at


def _fold_tick(contents: LogContents, body: bytes) -> None:
    (at,) = _TIME.unpack(body)
    contents.alive_at = max(contents.alive_at, at)


_FOLDS: dict[int, Callable[[LogContents, bytes], None]] = {
    OPENED: _fold_opened,
    EMITTED: _fold_emitted,
    ENDED: _fold_ended,
    TICK: _fold_tick,
    LOGPROBS: _fold_logprobs,
    CACHED: _fold_cached,
}
