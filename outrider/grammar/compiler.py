"""Test-compiles grammars in child processes, so that no grammar can hang or crash this process.

A compile process (`outrider.grammar.compile_worker`) holds the tokenizer and forks a process for
each grammar. A grammar that does not compile there within `CompileLimits` is never passed to the
grammar library in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import (
    CancelledRequestError,
    FailedPreconditionError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
)
from outrider.grammar.complexity import check_complexity
from outrider.grammar.limits import MAX_FIRST_TRY_S, MAX_FIRST_TRY_WALL_S, CompileLimits
from outrider.grammar.matcher_compiler import invalid_grammar_error, is_installed
from outrider.grammar.socket_frames import read_frame, write_frame
from outrider.spec.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

MAX_CACHED_OUTCOMES: Final = 1024
"""Maximum number of `CompileOutcome` objects that one `GrammarCompiler` caches."""
RETRY_AFTER_DEATH_S: Final = 30.0
"""Seconds for which a grammar stays refused after its compile process timed out or died. After
that, it may be tried again, because the machine may be less busy."""
START_TIMEOUT_S: Final = 60.0
"""Maximum time, in seconds, for starting a compile process, which first reads the tokenizer."""
MAX_BEGIN_S: Final = 5.0
"""Maximum time, in seconds, that a running compile process may take to begin with a grammar. A
process that takes longer hangs and is killed."""
REPLY_GRACE_S: Final = 1.0
"""Seconds to wait for an answer beyond the time limit of a compilation. After that, the process is
considered dead."""
_WORKER: Final = "outrider.grammar.compile_worker"
_MIN_TIMED_OUT: Final = 0.9
"""Share of the time limit. If a process ends after this share, the compilation is considered to
have timed out."""
_MAX_STARTS: Final = 2
"""Maximum number of compile processes that are started for one grammar if they die or hang before
they begin to compile the grammar."""


@dataclass(frozen=True, slots=True)
class CompileOutcome:
    """Result of a grammar's test compile."""

    error: OutriderError | None
    """Error for which the grammar is refused; None if the grammar can be used."""
    memory_bytes: int = 0
    """Memory of the compiled grammar in bytes; 0 if it could not be measured."""
    expires_at: float = float("inf")
    """Time of `time.monotonic` at which this outcome expires and the grammar is tried again."""


class FirstTryEndedError(Exception):
    """The first try to compile a grammar exceeded its short time limit, or its process died. The
    grammar may still be valid."""


class Cancellation:
    """Lets another thread end one call of `GrammarCompiler.validate`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the compilation that is running, or prevent its start; idempotent."""
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)

    def watch(self, connection: socket.socket | None) -> None:
        """Set the socket to the process that compiles, which `cancel` shuts down; None if nothing
        is being compiled.

        Raises CancelledRequestError if a socket is given and `cancel` was called before.
        """
        with self._lock:
            self._connection = connection
            if self.is_cancelled and connection is not None:
                self._connection = None
                raise _cancelled()


class GrammarCompiler:
    """Test-compiles grammars for one tokenizer.

    Thread-safe: each calling thread compiles one grammar at a time.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        limits: CompileLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a compiler.

        `tokenizer_json` is the content of a tokenizer.json. The compile process starts with the
        first grammar, because most fleets never receive one.
        """
        self.limits = limits or CompileLimits()
        self._json, self._vocab_size = tokenizer_json, vocab_size
        self._clock = clock
        self._server: _CompileServer | None = None
        self._server_lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, CompileOutcome] = OrderedDict()
        self._lock = threading.Lock()
        """Protects `_verdicts`."""

    @classmethod
    def load(
        cls, tokenizer_file: Path, *, vocab_size: int, limits: CompileLimits
    ) -> GrammarCompiler | None:
        """Create the compiler for a tokenizer.json.

        Returns None if the file is missing or the grammar library is not installed.
        """
        if not is_installed() or not tokenizer_file.is_file():
            return None
        text = tokenizer_file.read_text(encoding="utf-8")
        return cls(text, vocab_size=vocab_size, limits=limits)

    def close(self) -> None:
        """End the compile process and all compilations; idempotent."""
        with self._server_lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def find_verdict(self, structured: StructuredOutput) -> CompileOutcome | None:
        """Return the cached outcome of a grammar, or None if there is none."""
        key = _key(structured)
        with self._lock:
            found = self._verdicts.get(key)
            if found is None:
                return None
            if self._clock() >= found.expires_at:
                del self._verdicts[key]
                return None
            self._verdicts.move_to_end(key)
            return found

    def validate(
        self,
        structured: StructuredOutput,
        cancellation: Cancellation | None = None,
        *,
        is_first_try: bool = False,
    ) -> CompileOutcome:
        """Test-compile a grammar in a separate process, and return the outcome if the grammar can
        be used. A cached outcome is used if there is one.

        With `is_first_try` the time limit is short. A grammar that exceeds it raises
        FirstTryEndedError, and no outcome is cached.

        Raises InvalidRequestError if the grammar cannot be used, CancelledRequestError if the call
        is cancelled, FailedPreconditionError if the library cannot read the tokenizer, and
        UnavailableError if no process can be started.
        """
        verdict = self.find_verdict(structured)
        if verdict is None:
            verdict = self._try_out(
                structured, cancellation or Cancellation(), is_first_try=is_first_try
            )
            with self._lock:
                self._verdicts[_key(structured)] = verdict
                while len(self._verdicts) > MAX_CACHED_OUTCOMES:
                    self._verdicts.popitem(last=False)
        if verdict.error is not None:
            raise verdict.error.copy()
        return verdict

    def _try_out(
        self, structured: StructuredOutput, cancellation: Cancellation, *, is_first_try: bool
    ) -> CompileOutcome:
        try:
            check_complexity(structured)
        except InvalidRequestError as error:
            return CompileOutcome(error)
        for _ in range(_MAX_STARTS):
            server = self._running_server()
            try:
                connection = server.connect()
            except OSError:
                server.close()
                continue
            with connection:
                cancellation.watch(connection)
                try:
                    verdict = self._ask(server, connection, structured, is_first_try=is_first_try)
                except FirstTryEndedError:
                    if cancellation.is_cancelled:
                        raise _cancelled() from None
                    raise
                finally:
                    cancellation.watch(None)
            if cancellation.is_cancelled:
                raise _cancelled()
            if verdict is not None:
                return verdict
            server.close()
        raise UnavailableError(
            "grammars cannot be compiled: the compile process does not start",
            reason="COMPILER_UNAVAILABLE",
        )

    def _ask(
        self,
        server: _CompileServer,
        connection: socket.socket,
        structured: StructuredOutput,
        *,
        is_first_try: bool,
    ) -> CompileOutcome | None:
        """Compile a grammar in a process at the other end of a socket.

        Returns None if the process did not begin, or if `server` was killed because it hangs.
        Raises FirstTryEndedError if a first try timed out or died.
        """
        timeout_s = self.limits.timeout_s
        if is_first_try:
            timeout_s = min(timeout_s, MAX_FIRST_TRY_WALL_S)
        request = {
            "kind": structured.kind.value,
            "text": structured.text,
            "timeout_s": timeout_s,
            "processor_s": MAX_FIRST_TRY_S if is_first_try else None,
        }
        # The process says that it has begun: reading the tokenizer is not the grammar's time.
        begin_s = min(self.limits.timeout_s + REPLY_GRACE_S, MAX_BEGIN_S)
        try:
            connection.settimeout(begin_s if server.has_answered else START_TIMEOUT_S)
            write_frame(connection, json.dumps(request).encode())
            read_frame(connection)
        except TimeoutError:
            logger.warning("compile process hangs", extra={"started": server.has_answered})
            server.has_hung = True
            return None
        except (EOFError, OSError):
            return None
        server.has_answered = True
        began = time.monotonic()
        try:
            connection.settimeout(timeout_s + REPLY_GRACE_S)
            answer = json.loads(read_frame(connection))
        except (EOFError, OSError):
            if server.has_hung:
                return None
            if is_first_try:
                raise FirstTryEndedError from None
            # The process's clock began to run a little earlier than this one.
            if time.monotonic() - began >= _MIN_TIMED_OUT * timeout_s:
                return self._timed_out(structured)
            return self._died(structured)
        if "unsupported" in answer:
            error = FailedPreconditionError(answer["unsupported"], reason="UNSUPPORTED_TOKENIZER")
            return CompileOutcome(error)
        if "refused" in answer:
            return CompileOutcome(
                InvalidRequestError(
                    answer["refused"], reason="INVALID_STRUCTURE", param="structured_outputs"
                )
            )
        return CompileOutcome(None, memory_bytes=answer["memory_bytes"])

    def _timed_out(self, structured: StructuredOutput) -> CompileOutcome:
        why = f"compiling it takes longer than {self.limits.timeout_s:g} s"
        return CompileOutcome(
            invalid_grammar_error(structured, why), expires_at=self._clock() + RETRY_AFTER_DEATH_S
        )

    def _died(self, structured: StructuredOutput) -> CompileOutcome:
        why = (
            f"compiling it takes more than {self.limits.memory_mb} MiB of memory, or it is nested "
            "too deeply"
        )
        return CompileOutcome(
            invalid_grammar_error(structured, why), expires_at=self._clock() + RETRY_AFTER_DEATH_S
        )

    def _running_server(self) -> _CompileServer:
        with self._server_lock:
            if self._server is None or not self._server.is_alive:
                settings = {
                    "vocab_size": self._vocab_size,
                    "memory_bytes": self.limits.memory_mb << 20,
                }
                self._server = _CompileServer(settings, self._json)
            return self._server


class _CompileServer:
    """One compile process, which is never restarted.

    It ends when this object is garbage-collected.
    """

    def __init__(self, settings: dict[str, int], tokenizer_json: str) -> None:
        self.has_answered = False
        """Whether the process has begun a grammar, which means that it has read the tokenizer."""
        self.has_hung = False
        """Whether the process did not begin a grammar in time and therefore is, or will be,
        killed."""
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        """Protects `_control`."""
        self._process = _ServerProcess()
        weakref.finalize(self, _end_server, self._control, self._process)
        frames = [json.dumps(settings).encode(), tokenizer_json.encode()]
        # The process dies with the thread that starts it, so that thread waits for its end.
        threading.Thread(
            target=self._process.run, args=(theirs, frames), name="grammars", daemon=True
        ).start()

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended, as far as is known."""
        return not self._process.ended.is_set()

    def connect(self) -> socket.socket:
        """Return a socket to a new process for one grammar.

        Raises OSError if no process is running.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if not self.is_alive:
                    raise ConnectionResetError("the compile process has ended")
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """Kill the process and all its compilations; idempotent."""
        self._process.kill()


def _end_server(control: socket.socket, process: _ServerProcess) -> None:
    """Kill a compile process to which no references are left."""
    control.close()
    process.kill()


class _ServerProcess:
    """Operating-system process of a compile server, and the process group of its children."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        """Set once the process has ended, could not be started, or was killed."""
        self._lock = threading.RLock()
        """Protects `_pid`. Reentrant, because the garbage collector may call `kill` on a thread
        that already holds the lock."""
        self._pid: int | None = None
        """Process id until the process is reaped, else None."""

    def run(self, control: socket.socket, frames: list[bytes]) -> None:
        """Run the process until it ends. It receives `frames` first, then serves `control`."""
        ours, theirs = socket.socketpair()
        try:
            with control, theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", _WORKER, str(theirs.fileno()), str(control.fileno())],
                    pass_fds=(theirs.fileno(), control.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                )
            with self._lock:
                self._pid = process.pid
                if self.ended.is_set():
                    self._signal_group()
            with ours, contextlib.suppress(OSError):
                for frame in frames:
                    write_frame(ours, frame)
            frames.clear()
            # It stays a zombie until `_pid` is forgotten, so its id is nobody else's meanwhile.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._signal_group()
                self._pid = None
                status = process.wait()
            if not self.ended.is_set():
                logger.warning("compile process ended", extra={"status": status})
        except OSError as error:
            logger.warning("compile process not started", extra={"reason": str(error)})
        finally:
            self.ended.set()

    def kill(self) -> None:
        """Kill the process and its children, even if they are stopped; idempotent."""
        self.ended.set()
        with self._lock:
            self._signal_group()

    def _signal_group(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)


def _cancelled() -> CancelledRequestError:
    return CancelledRequestError("nobody waits for this grammar any more")


def _key(structured: StructuredOutput) -> bytes:
    content = f"{structured.kind.value}\0{structured.text}"
    return hashlib.sha256(content.encode(errors="surrogatepass")).digest()
