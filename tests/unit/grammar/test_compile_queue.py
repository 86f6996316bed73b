"""Requests that wait for one grammar share its compiling; nobody compiles for those who left."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.errors import InvalidRequestError, ResourceExhaustedError
from outrider.grammar import compile_queue as module
from outrider.grammar.compile_queue import CompileQueue
from outrider.grammar.compiler import Cancellation
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.waiting import until


class SlowCompiler:
    """Compiles once `go_on` is set; refuses the text "bad"."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.cancellations: list[Cancellation] = []
        self.go_on = threading.Event()

    def compile(self, structured: StructuredOutput, cancellation: Cancellation) -> str:
        self.compiled.append(structured.text)
        self.cancellations.append(cancellation)
        assert self.go_on.wait(30.0)
        if structured.text == "bad":
            raise InvalidRequestError("no good", reason="INVALID_STRUCTURE")
        return structured.text


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


async def test_too_many_grammars_at_once_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    with pytest.raises(ResourceExhaustedError) as refused:
        await CompileQueue(SlowCompiler().compile, threads=1).compile(regex("a"))
    assert refused.value.retry_after_s == module.RETRY_S


async def test_all_that_wait_for_one_grammar_share_its_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    compiler = SlowCompiler()
    queue = CompileQueue(compiler.compile, threads=1)
    first, *more = [asyncio.create_task(queue.compile(regex("a"))) for _ in range(10)]
    refused = [asyncio.create_task(queue.compile(regex("bad"))) for _ in range(10)]
    await until(lambda: compiler.compiled == ["a"], 30.0)
    with pytest.raises(ResourceExhaustedError):
        await queue.compile(regex("c"))
    first.cancel()
    await asyncio.wait([first])
    assert not compiler.cancellations[0].is_cancelled, "others wait for it"
    compiler.go_on.set()
    assert await asyncio.gather(*more) == ["a"] * 9
    errors = await asyncio.gather(*refused, return_exceptions=True)
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert len(set(map(id, errors))) == 10, "an error that is raised twice chains tracebacks"
    assert compiler.compiled == ["a", "bad"]
    await queue.compile(regex("c"))
    assert compiler.compiled == ["a", "bad", "c"]


async def test_a_grammar_that_nobody_waits_for_is_cancelled_and_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    compiler = SlowCompiler()
    queue = CompileQueue(compiler.compile, threads=1)
    left = asyncio.create_task(queue.compile(regex("left")))
    await until(lambda: compiler.compiled == ["left"], 30.0)
    left.cancel()
    await asyncio.wait([left])
    assert compiler.cancellations[0].is_cancelled
    stays = asyncio.create_task(queue.compile(regex("stays")))
    await asyncio.sleep(0)
    compiler.go_on.set()
    await stays
    assert compiler.compiled == ["left", "stays"]


async def test_several_grammars_are_compiled_at_once() -> None:
    compiler = SlowCompiler()
    queue = CompileQueue(compiler.compile, threads=2)
    tasks = [asyncio.create_task(queue.compile(regex(text))) for text in ("a", "b")]
    await until(lambda: sorted(compiler.compiled) == ["a", "b"], 30.0)
    compiler.go_on.set()
    assert await asyncio.gather(*tasks) == ["a", "b"]
