"""Grammars that stop or kill whatever compiles them cost one process and one request."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from outrider.errors import CancelledRequestError, FailedPreconditionError, InvalidRequestError
from outrider.grammar import compiler as module
from outrider.grammar.compiler import Cancellation, GrammarCompiler
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.limits import CompileLimits
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.unit.grammar import attacks
from tests.waiting import wait_until

TIMEOUT_S = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def tokenizer_json(tiny_target: Path) -> str:
    return (tiny_target / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def compiler(tokenizer_json: str) -> Iterator[GrammarCompiler]:
    limits = CompileLimits(timeout_s=TIMEOUT_S, memory_mb=256)
    found = GrammarCompiler(tokenizer_json, vocab_size=384, limits=limits)
    yield found
    found.close()


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def compile_processes() -> list[int]:
    """Compile processes of this process, whichever thread started them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        # Threads and processes may end meanwhile.
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"compile_worker" in command:
                    found.append(int(child))
    return found


@contextmanager
def own_compiler(
    tokenizer_json: str, *, timeout_s: float = 5.0
) -> Iterator[tuple[GrammarCompiler, int]]:
    """A compiler whose process runs, and the id of that process."""
    before = set(compile_processes())
    limits = CompileLimits(timeout_s=timeout_s)
    compiler = GrammarCompiler(tokenizer_json, vocab_size=384, limits=limits)
    compiler.validate(regex("warm"))
    (server,) = set(compile_processes()) - before
    # The process that compiled it answers before it ends.
    wait_until(lambda: not children_of(server), timeout_s=10.0, what="the end of the first one")
    yield compiler, server
    compiler.close()


@pytest.mark.parametrize(
    "attack",
    [attacks.large_multiple, attacks.optional_properties, attacks.intersected_expressions],
)
def test_a_grammar_beyond_the_limits_is_refused_in_time(
    compiler: GrammarCompiler, attack: Callable[[], StructuredOutput]
) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes (longer|more) than") as refused:
        compiler.validate(attack())
    assert refused.value.reason == "INVALID_STRUCTURE"
    # The first one waits for the start of the process, too.
    assert time.monotonic() - began < TIMEOUT_S + 5.0
    assert compiler.validate(regex("[abc]{1,9}")).error is None


@pytest.mark.parametrize("attack", [attacks.chained_rules, attacks.chained_references])
def test_what_only_needs_stack_is_compiled_in_both_processes(
    tokenizer_json: str, attack: Callable[[], StructuredOutput]
) -> None:
    grammars = GrammarCache(tokenizer_json, vocab_size=384)
    grammars.compile_grammar(attack()).start_constraint([2])
    grammars.close()


def test_a_grammar_that_takes_too_much_memory_is_refused(tokenizer_json: str) -> None:
    limits = CompileLimits(timeout_s=30.0, memory_mb=64)
    compiler = GrammarCompiler(tokenizer_json, vocab_size=384, limits=limits)
    with pytest.raises(InvalidRequestError, match="more than 64 MiB"):
        compiler.validate(regex("a?" * 30_000))
    compiler.close()


def test_time_outs_are_kept_for_a_while_and_refusals_for_good(tokenizer_json: str) -> None:
    clock = Clock()
    limits = CompileLimits(timeout_s=0.2)
    compiler = GrammarCompiler(tokenizer_json, vocab_size=384, limits=limits, clock=clock)
    slow, bad, good = attacks.large_multiple(), regex("("), regex("good")
    for structured in (slow, bad):
        with pytest.raises(InvalidRequestError):
            compiler.validate(structured)
    compiler.validate(good)
    clock.now = 29.0
    assert all(compiler.find_verdict(structured) for structured in (slow, bad, good))
    clock.now = 31.0
    assert compiler.find_verdict(slow) is None
    assert compiler.find_verdict(bad) and compiler.find_verdict(good)
    compiler.close()


def test_who_leaves_ends_the_process_that_compiles(tokenizer_json: str) -> None:
    cancellation, errors = Cancellation(), list[Exception]()
    with own_compiler(tokenizer_json) as (compiler, server):

        def validate() -> None:
            try:
                compiler.validate(attacks.large_multiple(), cancellation)
            except CancelledRequestError as error:
                errors.append(error)

        thread = threading.Thread(target=validate)
        thread.start()
        wait_until(lambda: bool(children_of(server)), timeout_s=10.0, what="a process for it")
        cancellation.cancel()
        thread.join(timeout=10.0)
        assert len(errors) == 1
        wait_until(lambda: not children_of(server), timeout_s=4.0, what="its end")
        with pytest.raises(CancelledRequestError):
            compiler.validate(regex("never"), cancellation)


def test_a_compile_process_that_was_killed_is_replaced(tokenizer_json: str) -> None:
    with own_compiler(tokenizer_json) as (compiler, server):
        os.kill(server, signal.SIGKILL)
        compiler.validate(regex("after"))
        assert server not in compile_processes()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# The long text does not fit into the buffer of a socket that nobody reads.
@pytest.mark.parametrize("text", ["after", "a" * 250_000], ids=["short", "long"])
def test_a_compile_process_that_is_stopped_is_killed_and_replaced(
    tokenizer_json: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BEGIN_S", 1.0)
    outcomes = list[Exception | None]()
    with own_compiler(tokenizer_json, timeout_s=3.0) as (compiler, server):

        def validate_slow() -> None:
            try:
                outcomes.append(compiler.validate(attacks.large_multiple()).error)
            except InvalidRequestError as error:
                outcomes.append(error)

        slow = threading.Thread(target=validate_slow)
        slow.start()
        wait_until(lambda: bool(children_of(server)), timeout_s=10.0, what="a process for it")
        (child,) = children_of(server)
        os.kill(server, signal.SIGSTOP)
        began = time.monotonic()
        with suppress(InvalidRequestError):
            compiler.validate(regex(text))
        assert time.monotonic() - began < 6.0
        wait_until(lambda: is_gone(server), timeout_s=5.0, what="the end of the stopped process")
        wait_until(lambda: is_gone(child), timeout_s=5.0, what="the end of what it forked")
        slow.join(timeout=20.0)
        assert len(outcomes) == 1 and "longer than 3 s" in str(outcomes[0])


def test_a_stopped_compile_process_ends_with_its_compiler(tokenizer_json: str) -> None:
    threads = threading.active_count()
    with own_compiler(tokenizer_json) as (_, server):
        os.kill(server, signal.SIGSTOP)
    wait_until(lambda: is_gone(server), timeout_s=10.0, what="its end")
    wait_until(lambda: threading.active_count() <= threads, timeout_s=10.0, what="its thread's end")


def test_the_compile_process_ends_with_its_compiler(tokenizer_json: str) -> None:
    compiler, server = own_compiler(tokenizer_json).__enter__()
    maps = Path(f"/proc/{server}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps, "it starts fast and is small"
    del compiler
    gc.collect()
    wait_until(lambda: server not in compile_processes(), timeout_s=10.0, what="its end")


def test_a_tokenizer_that_cannot_be_read_is_said_to_be_one() -> None:
    compiler = GrammarCompiler('{"no": "tokenizer"}', vocab_size=384)
    with pytest.raises(FailedPreconditionError, match="with this tokenizer"):
        compiler.validate(regex("a"))
    compiler.close()


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        CompileLimits(timeout_s=0.0)
    with pytest.raises(ValueError, match="memory_mb"):
        CompileLimits(memory_mb=1)
    with pytest.raises(ValueError, match="processes"):
        CompileLimits(processes=0)
