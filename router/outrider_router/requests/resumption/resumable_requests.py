"""Resumable requests of one router: their tasks, their answers, and the durable log.

A request that is not resumable runs in the task of its client's call and does not use this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from outrider.errors import OutriderError
from outrider.ids import RequestId
from outrider.spec.sampling import Rule
from outrider.text.tokenizer import Tokenizer
from outrider.transport.error_codec import to_typed_error
from outrider.wire.inference import Delta, FinishInfo, StreamEvent
from outrider.wire.messages import FinishReason
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.tenants import Caller
from outrider_router.config import RouterConfig
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.request_output import RequestOutput
from outrider_router.requests.resumption.durable_log import DurableLog
from outrider_router.requests.resumption.log_records import EmittedRow, LoggedRequest, OpenedRequest
from outrider_router.requests.resumption.resumable_answers import AnswerStore, ResumableAnswer
from outrider_router.requests.running_requests import RequestEntry, RunningRequests

logger = logging.getLogger(__name__)

RequestFactory = Callable[[], Awaitable[ValidatedRequest]]
RequestHandler = Callable[[RequestEntry, RequestFactory], AsyncGenerator[StreamEvent, None]]
"""Function that yields the messages of a request. Closing the generator releases the request's
resources.
"""

UNWANTED_REASONS = ("ABORTED", "ABANDONED")
"""Reasons of errors after which no client asks for the answer any more."""
REPRODUCIBLE_RULES = (Rule.GREEDY, Rule.COUPLED)
"""Acceptance rules with which the text depends only on the prompt and the seed."""


class ResumableRequests:
    """Runs resumable requests, keeps and logs their answers, and resumes requests from the log
    after a restart.
    """

    def __init__(
        self,
        config: RouterConfig,
        running_requests: RunningRequests,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        *,
        run: RequestHandler,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Create an object without requests. `clock` returns monotonic and `wall` wall-clock time,
        both in seconds.
        """
        self._config = config
        self._running_requests = running_requests
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._run = run
        self._clock = clock
        self._wall = wall
        self._log: DurableLog | None = None
        self._answers = AnswerStore(grace_s=config.resume_grace_s, on_forgotten=self._forgotten)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def __len__(self) -> int:
        """Return the number of answers of running and finished requests."""
        return len(self._answers)

    def get_answer(self, request_id: RequestId) -> ResumableAnswer | None:
        """Return the answer of a request that is running or ended recently, or None."""
        return self._answers.get_answer(request_id)

    def start_request(
        self, entry: RequestEntry, make: RequestFactory, *, may_lag: bool = False
    ) -> ResumableAnswer:
        """Run a request in a separate task and return its answer. `may_lag` is described at
        `ResumableAnswer.may_lag`.
        """
        answer = self._answers.add_answer(entry, may_lag=may_lag)

        async def make_logged() -> ValidatedRequest:
            job = await make()
            self._log_opened(entry, job)
            return job

        task = answer.start_task(self._follow(answer, make_logged))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    def interrupt_answer(self, entry: RequestEntry, error: OutriderError) -> None:
        """If the task of a failing request is waiting for a slow client, end that client's call
        with `error`, so that the task can continue. Has no effect for requests that are not
        resumable.
        """
        answer = self._answers.get_answer(entry.request_id)
        if answer is not None and answer.entry is entry:
            answer.interrupt(error)

    def survives_restart(self, entry: RequestEntry) -> bool:
        """Return whether a request would continue after a restart of this router."""
        return entry.output.log_number != 0 and self._log is not None and not self._log.is_failing

    # ---- the log -------------------------------------------------------------------------------

    def open_log(self) -> None:
        """Open the log if one is configured, and continue the requests that were running when it
        was last written.

        Raises FailedPreconditionError if another router uses the log.
        """
        if self._config.journal is None:
            return
        self._log = DurableLog(
            self._config.journal,
            fsync=self._config.journal_fsync,
            wall=self._wall,
            on_failing=self._metrics.journal_failing.set,
            read_s=self._config.journal_read_s,
        )
        contents = self._log.contents
        self._metrics.journal_damaged.inc(contents.num_damaged)
        # If the record of an end is damaged, an id may occur twice; the later request counts.
        latest = {logged.opened.request_id: logged for logged in contents.requests.values()}
        for logged in latest.values():
            try:
                self._restore(logged, self._log, contents.alive_at)
            except Exception:
                # A file that was tampered with must not keep the router from serving.
                logger.exception("journal request not restored")
                self._metrics.restored_requests.labels("dropped").inc()
        contents.requests.clear()
        self._log.start_writing()

    def _log_opened(self, entry: RequestEntry, job: ValidatedRequest) -> None:
        """Log a request that was accepted, unless it was restored from the log."""
        if self._log is None or entry.output.log_number:
            return
        left = None if entry.deadline is None else entry.deadline - self._clock()
        opened = OpenedRequest(
            request_id=entry.request_id,
            job=job,
            deadline=None if left is None else self._wall() + left,
            tokenizer_hash=self._tokenizer.hash,
        )
        output = entry.output
        output.record_logged(self._log.append_opened(opened, output.token_ids, output.logprobs))

    def log_emitted(self, rows: Sequence[EmittedRow]) -> None:
        """Log new token ids of logged requests. Must be called before any client receives them."""
        if self._log is not None:
            self._log.append_emitted(rows)

    def _log_finished(self, entry: RequestEntry, finish: FinishInfo) -> None:
        """Log the finish of a request, before any client receives it."""
        if self._log is not None and entry.output.log_number:
            self._log.append_ended(entry.output.log_number, finish)

    def prepare_close(self) -> None:
        """Keep requests that fail from now on in the log, so that the next router continues them.

        Must be called before the first of these requests fails, because its task may run at once.
        """
        self._closing = True

    async def close(self) -> None:
        """Wait until all requests have ended, then close the log."""
        self.prepare_close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._answers.clear()
        if self._log is not None:
            await self._log.close()

    # ---- one request ---------------------------------------------------------------------------

    async def _follow(self, answer: ResumableAnswer, make: RequestFactory) -> None:
        error: OutriderError | None = None
        try:
            async with aclosing(self._run(answer.entry, make)) as events:
                async for event in events:
                    if isinstance(event, FinishInfo):
                        self._log_finished(answer.entry, event)
                    await answer.add_event(event)
        except Exception as problem:
            error = problem if isinstance(problem, OutriderError) else to_typed_error(problem)
        answer.finish_answer(error)
        if self._closing:
            return
        if error is not None and self._log is not None:
            self._log.append_ended(answer.entry.output.log_number, None)
        # An answer that failed before its first message is dropped: its client sends a new request.
        if answer.info is None or (error is not None and error.reason in UNWANTED_REASONS):
            self._answers.drop_answer(answer)
        else:
            self._answers.keep_finished(answer)

    def _forgotten(self, entry: RequestEntry) -> None:
        if self._log is not None:
            self._log.forget_request(entry.output.log_number)

    # ---- after a restart -----------------------------------------------------------------------

    def _restore(self, logged: LoggedRequest, log: DurableLog, alive_at: float) -> None:
        now, opened = self._wall(), logged.opened
        left_s = self._config.resume_grace_s - (now - (logged.ended_at or alive_at))
        late = opened.deadline is not None and opened.deadline <= now
        if left_s <= 0 or late or opened.tokenizer_hash != self._tokenizer.hash:
            self._metrics.restored_requests.labels("dropped").inc()
            return
        log.restore_request(logged)
        if logged.finish is not None:
            self._metrics.restored_requests.labels("ended").inc()
            self._keep_ended(logged, logged.finish, left_s)
        else:
            self._metrics.restored_requests.labels("running").inc()
            left = None if opened.deadline is None else opened.deadline - now
            self._go_on(logged, left)

    def _go_on(self, logged: LoggedRequest, left_s: float | None) -> None:
        """Run a restored request from the tokens that it has emitted. `left_s` is the time until
        its deadline in seconds, or None.
        """
        job, now = logged.opened.job, self._clock()
        entry = RequestEntry(
            request_id=logged.opened.request_id,
            arrived_at=now,
            caller=Caller(tenant=job.tenant),
            deadline=None if left_s is None else now + left_s,
            is_restored=True,
            on_failing=self.interrupt_answer,
            output=_restored_output(logged, now),
        )
        self._running_requests.add_entry(entry)

        async def made() -> ValidatedRequest:
            return job

        may_lag = job.sampling.effective_rule in REPRODUCIBLE_RULES
        self.start_request(entry, made, may_lag=may_lag)

    def _keep_ended(self, logged: LoggedRequest, finish: FinishInfo, left_s: float) -> None:
        job = logged.opened.job
        # Earlier versions logged ids behind a stop string, too.
        del logged.emitted[finish.usage.completion_tokens :]
        entry = RequestEntry(
            request_id=logged.opened.request_id,
            arrived_at=self._clock(),
            caller=Caller(tenant=job.tenant),
            is_restored=True,
            output=_restored_output(logged, None),
        )
        entry.end_request()
        ids = entry.output.token_ids
        assembler = job.make_assembler(self._tokenizer)
        stopped = finish.reason is FinishReason.STOP_TOKEN
        text = assembler.push_tokens(ids, last_is_stop=stopped) + assembler.flush()
        answer = self._answers.add_answer(entry)
        answer.store_event(job.prompt_info(entry.request_id))
        # The answer reads its log-probabilities from the entry.
        answer.store_event(Delta(text=text, token_ids=tuple(ids)))
        answer.store_event(finish)
        answer.finish_answer(None)
        self._answers.keep_finished(answer, left_s)


def _restored_output(logged: LoggedRequest, now: float | None) -> RequestOutput:
    """Return the output of a logged request, which shares its lists with the log. `now` is used as
    the clock time of its tokens in seconds; with None the tokens have no time.
    """
    # The log may lack token ids that follow logged log-probabilities.
    del logged.logprobs[len(logged.emitted) :]
    told_at = now if logged.emitted else None
    return RequestOutput(
        token_ids=logged.emitted,
        logprobs=logged.logprobs,
        first_token_at=told_at,
        last_token_at=told_at or 0.0,
        cached_tokens=logged.cached_tokens,
        log_number=logged.number,
    )
