"""Compile process: loads one tokenizer, then forks a process for each grammar to compile.

`outrider.grammar.compiler` starts it as `python -m outrider.grammar.compile_worker SETTINGS
CONTROL`. The arguments are the file descriptors of two stream sockets. SETTINGS carries a frame
with the settings as JSON and a frame with the tokenizer. CONTROL carries, for each grammar, one
byte together with the descriptor of a new socket. The forked process receives the grammar and its
time limits over the new socket. It sends an empty frame when it begins, and its verdict as JSON
when it ends. The compile process ends when the other end of CONTROL is closed, and a forked process
when the other end of its socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import OutriderError
from outrider.grammar.matcher_compiler import (
    NICE_INCREMENT,
    STACK_BYTES,
    call_with_stack,
    compile_matcher,
    load_tokenizer,
)
from outrider.grammar.socket_frames import read_frame, write_frame
from outrider.spec.structured_output import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ADDRESS_SLACK_BYTES: Final = 64 << 20
"""Address space, in bytes, that a compilation may take beyond its memory limit, because allocators
reserve address space that they do not use."""
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Serve the two sockets whose file descriptors are the command-line arguments."""
    _die_with_parent()
    # Children are reaped by the system; the other end learns of their ends by their sockets.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError, EOFError):
        _serve(*[socket.socket(fileno=int(number)) for number in sys.argv[1:]])


def _serve(source: socket.socket, control: socket.socket) -> None:
    with source:
        settings = json.loads(read_frame(source))
        tokenizer_json = read_frame(source).decode()
    tokenizer: LLTokenizer | OutriderError
    try:
        tokenizer = load_tokenizer(tokenizer_json, vocab_size=settings["vocab_size"])
    except OutriderError as error:
        tokenizer = error
    del tokenizer_json
    os.nice(NICE_INCREMENT)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        status = 1
        try:
            control.close()
            _run_child(socket.socket(fileno=fds[0]), tokenizer, settings)
            status = 0
        finally:
            os._exit(status)


def _run_child(
    connection: socket.socket, tokenizer: LLTokenizer | OutriderError, settings: dict[str, Any]
) -> None:
    """Compile the one grammar that comes over `connection`, within the limits."""
    _die_with_parent()
    # The library reports memory that it does not get on stderr; the other end reports it better.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    request = json.loads(read_frame(connection))
    structured = StructuredOutput(StructuredKind(request["kind"]), request["text"])
    # SIGALRM ends the process by itself: no Python code needs to run for that.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
    if request["processor_s"] is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, request["processor_s"])
    _limit_memory(settings["memory_bytes"])
    watch = threading.Thread(target=_exit_when_closed, args=(connection,), daemon=True)
    watch.start()
    write_frame(connection, b"")
    write_frame(connection, json.dumps(_answer(structured, tokenizer)).encode())


def _answer(structured: StructuredOutput, tokenizer: LLTokenizer | OutriderError) -> dict[str, Any]:
    """Return the message for the other end: a dict with one key. The key is `memory_bytes` (memory
    of the compiled grammar), `refused` (why the grammar cannot be used) or `unsupported` (why the
    library cannot read the tokenizer)."""
    if isinstance(tokenizer, OutriderError):
        return {"unsupported": tokenizer.message}
    before = _memory_pages()[1]
    try:
        matcher = call_with_stack(lambda: compile_matcher(tokenizer, structured))
    except OutriderError as error:
        return {"refused": error.message}
    # Sessions copy a matcher, compute its masks and drop it in threads with ordinary stacks.
    matcher.deep_copy().compute_bitmask()
    grown = (_memory_pages()[1] - before) * resource.getpagesize()
    del matcher
    return {"memory_bytes": max(0, grown)}


def _exit_when_closed(connection: socket.socket) -> None:
    """End the process when the other end of the socket is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP)
    poll.poll()
    os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = _memory_pages()[0] * resource.getpagesize()
    bound = used + STACK_BYTES + ADDRESS_SLACK_BYTES + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _memory_pages() -> tuple[int, int]:
    """Return the address space and the resident memory of this process, in pages."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            address_space, memory = file.read().split()[:2]
    except OSError:
        # Not Linux: the limit then counts from nothing, with room for what is loaded.
        return (1 << 30) // resource.getpagesize(), 0
    return int(address_space), int(memory)


def _die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends (Linux)."""
    set_option: Callable[..., int] | None = None
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).prctl
    if set_option is not None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
