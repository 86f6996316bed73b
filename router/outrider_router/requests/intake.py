"""Request intake: access check, validation and the registry entry of a new request."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outrider.errors import InvalidRequestError, OutriderError
from outrider.ids import RequestId
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.tools import OutputParsing
from outrider.text.tokenizer import LONG_INPUT, Tokenizer
from outrider.wire.inference import ChatPrompt, GenerateRequest, Prompt
from outrider_router.admission.access_control import AccessControl, AccessGrant
from outrider_router.admission.policy import no_verifier_error
from outrider_router.admission.queue import AdmissionQueue
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.tenants import Caller
from outrider_router.config import RouterConfig
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.answer_format import AnswerFormat
from outrider_router.requests.grammar_check import GrammarChecker
from outrider_router.requests.request import (
    ValidatedRequest,
    chat_size,
    max_session_len,
    run_by_size,
    tokenize_prompt,
    validate_request,
)
from outrider_router.requests.request_spans import request_span
from outrider_router.requests.running_requests import RequestEntry, RunningRequests
from outrider_router.requests.shared_results import SharedResults


class RequestIntake:
    """Validates new requests and opens their registry entries. A router has one."""

    def __init__(
        self,
        config: RouterConfig,
        running_requests: RunningRequests,
        tokenizer: Tokenizer,
        *,
        access_control: AccessControl,
        admission: AdmissionQueue,
        registry: PeerRegistry,
        clock: Callable[[], float],
        on_failing: Callable[[RequestEntry, OutriderError], None],
    ) -> None:
        """Create the intake. `on_failing` is called with each request that fails, before its task
        ends.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._access_control = access_control
        self._running_requests = running_requests
        self._admission = admission
        self._registry = registry
        self._forms = GrammarChecker(
            tokenizer.file, vocab_size=tokenizer.num_ids, limits=config.grammar_compile
        )
        self._answer_format = AnswerFormat(tokenizer, config)
        self._prompt_ids = SharedResults[tuple[ChatPrompt, int], tuple[int, ...]]()
        self._grammars = SharedResults[
            tuple[ChatPrompt, StructuredOutput | None], StructuredOutput | None
        ]()
        self._clock = clock
        self._on_failing = on_failing

    def prepare(self) -> None:
        """Load the tokenizer for checking grammars. This is slow, so it is done before requests are
        served.
        """
        self._forms.prepare()

    def close(self) -> None:
        """Stop the processes that check grammars. Idempotent."""
        self._forms.close()

    def open_entry(
        self,
        request: GenerateRequest,
        name: RequestId | None,
        timeout_s: float | None,
        caller: Caller,
        *,
        traceparent: str = "",
        passed: AccessGrant | None = None,
        group: RequestGroup | None = None,
    ) -> tuple[RequestEntry, GenerateRequest]:
        """Open the registry entry of a new request. Return it with the request as limited by the
        caller's API key.

        The entry releases its access grant when it ends. `name` is the request's id; one is
        generated if it is None. `passed` is the grant of a request that access control has already
        admitted. `group` is the request group of the request. Raises InvalidRequestError,
        AlreadyExistsError, and the errors of access control.
        """
        if request.request_id == "":
            raise InvalidRequestError("request_id must not be empty", reason="INVALID_REQUEST_ID")
        name = name or RequestId(f"req-{secrets.token_hex(8)}")
        # Check this first, because access control counts each request that it admits.
        self._running_requests.check_unused(name)
        arrived_at = self._clock()
        passed = passed or self._access_control.enter_requests(caller, (request,))[0]
        entry = RequestEntry(
            request_id=name,
            arrived_at=arrived_at,
            caller=caller,
            group=group,
            deadline=None if timeout_s is None else arrived_at + timeout_s,
            span=request_span(name, traceparent),
            release=passed.release,
            on_failing=self._on_failing,
        )
        self._running_requests.add_entry(entry)
        return entry, passed.request

    async def validate_request(self, request: GenerateRequest, caller: Caller) -> ValidatedRequest:
        """Tokenize and validate a request, and compile its grammar.

        Raises InvalidRequestError, NotFoundError for a model that is not served, UnavailableError
        while no verifier is known, and the errors of `GrammarChecker.check_grammar`.
        """
        info = self._registry.any_verifier_info()
        if info is None:
            raise no_verifier_error()
        prompt_ids = await self._tokenize(request.prompt, max_session_len(self._config, info))
        parsing = self._answer_format.describe_parsing(
            request, prompt_ids, call_id_seed=secrets.randbits(63)
        )
        thinking_budget = self._answer_format.thinking_budget(request, parsing)
        enforced = await self._make_grammar(request, parsing, prompt_ids)
        is_for_tools = enforced is not None and request.structured_output is None
        if enforced is not request.structured_output:
            request = replace(request, structured_output=enforced)
        if request.structured_output is not None:
            try:
                await self._forms.check_grammar(request.structured_output, tenant=caller.tenant)
            except InvalidRequestError as error:
                if is_for_tools and isinstance(request.prompt, ChatPrompt):
                    raise self._answer_format.grammar_error(
                        request.prompt, request.structured_output, error
                    ) from error
                raise
        job = validate_request(
            request,
            prompt_ids,
            info=info,
            tokenizer=self._tokenizer,
            config=self._config,
            seed=secrets.randbits(63),
            tenant=caller.tenant,
            parsing=parsing,
            thinking_budget=thinking_budget,
        )
        known = self._registry.any_verifier_info() is not None
        if known and not self._admission.could_fit(job.kv_tokens):
            raise InvalidRequestError(
                f"the request needs {job.kv_tokens} tokens of KV cache, more than any verifier has",
                reason="REQUEST_TOO_LARGE",
                param="max_tokens",
            )
        return job

    async def _tokenize(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        async def tokenize() -> tuple[int, ...]:
            return await tokenize_prompt(
                prompt,
                self._tokenizer,
                parse_special_tokens=self._config.special_tokens_in_messages,
                max_tokens=max_tokens,
            )

        if not isinstance(prompt, ChatPrompt) or chat_size(prompt) <= LONG_INPUT:
            return await tokenize()
        return await self._prompt_ids.get_result((prompt, max_tokens), tokenize)

    async def _make_grammar(
        self, request: GenerateRequest, parsing: OutputParsing | None, prompt_ids: tuple[int, ...]
    ) -> StructuredOutput | None:
        """Return the grammar or structured output that a request needs; None if it needs none.
        Reading the schemas of a thousand tools takes some 0.2 s."""
        prompt, structured = request.prompt, request.structured_output
        if parsing is None or not isinstance(prompt, ChatPrompt):
            return structured
        size = chat_size(prompt)
        make = partial(self._answer_format.make_grammar, prompt, structured, parsing)

        async def make_by_size() -> StructuredOutput | None:
            return await run_by_size(size, make, prompt_ids)

        if size <= LONG_INPUT:
            return await make_by_size()
        # The rest of what the grammar depends on follows from these.
        return await self._grammars.get_result((prompt, structured), make_by_size)
