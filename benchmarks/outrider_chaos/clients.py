"""Clients of a run: each sends one request over its own connection and records a history of
events."""

from __future__ import annotations

import asyncio
import time

from outrider.chaos.history import ClientHistory
from outrider.chaos.proxy import TcpProxy
from outrider.chaos.requests import PROMPTS, ChaosRequest
from outrider.client import AsyncClient, RetryPolicy
from outrider.errors import DeadlineExceededError, UnavailableError

TIMEOUT_S = 30.0
"""Timeout in seconds of a request without a deadline. A request that reaches it counts as
hanging."""
_RETRY = RetryPolicy(max_attempts=200, first_delay_s=0.02, max_delay_s=0.1)


class ChaosClient:
    """One client with its request, its proxy to the router, and the history of what it received."""

    def __init__(
        self,
        number: int,
        ask: ChaosRequest,
        door: TcpProxy,
        began: float,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create the client of request `ask`, which `start` will send through the proxy `door`.
        `began` is the monotonic time at which the run began. A request without a deadline counts as
        hanging after `timeout_s` seconds."""
        self.history = ClientHistory(number=number)
        self.deadline_s: float | None = None
        """Deadline of the request in seconds, or None. It must be set before `start`."""
        self.door = door
        self.ask = ask
        self._began = began
        self._timeout_s = timeout_s
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens received so far."""
        return sum(len(heard.token_ids) for heard in self.history.heard)

    @property
    def over(self) -> bool:
        """Whether the client has ended, because its answer is complete, its request has failed, or
        it has left."""
        return self._task is not None and self._task.done()

    def start(self) -> asyncio.Task[None]:
        """Start a task that sends the request and reads the answer, and return the task."""
        self._task = asyncio.create_task(self._run(), name=f"reader-{self.history.number}")
        return self._task

    def pause(self) -> None:
        """Stop reading the answer until `resume` is called."""
        self._may_read.clear()

    def resume(self) -> None:
        """Continue reading after `pause`."""
        self._may_read.set()

    def leave(self, *, abruptly: bool) -> None:
        """Stop the request. If `abruptly`, also reset the connection, as if the client's process
        were killed."""
        self._gone.set()
        self._may_read.set()
        if abruptly:
            self.door.shut()

    async def _run(self) -> None:
        await asyncio.sleep(self.ask.starts_s)
        self.history.began = self._now()
        reading = asyncio.create_task(self._read())
        leaving = asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                self.history.left(self._now())
                return
            error = reading.exception()
            if error is not None:
                self._note(error)
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    def _note(self, error: BaseException) -> None:
        # Close to its deadline a client does not try again what it could.
        too_late = isinstance(error, DeadlineExceededError | UnavailableError)
        if self.deadline_s is not None and too_late:
            self.history.left(self._now())
        elif isinstance(error, DeadlineExceededError):
            self.history.ended, self.history.error = self._now(), error
        else:
            self.history.failed(error, self._now())

    async def _read(self) -> None:
        timeout_s = self.deadline_s or self._timeout_s
        async with AsyncClient(self.door.address, retry=_RETRY, timeout_s=timeout_s) as client:
            stream = client.stream(PROMPTS[self.ask.text.prompt], **self.ask.options)
            async with stream:
                async for delta in stream:
                    self.history.add_delta(delta, self._now())
                    await self._may_read.wait()
            self.history.finished(stream.finish, self._now())

    def _now(self) -> float:
        return time.monotonic() - self._began
