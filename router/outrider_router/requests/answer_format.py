"""Format of the answers to chat requests: how they are parsed, which grammar enforces it, and how
their reasoning is limited."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from outrider.errors import InvalidRequestError
from outrider.grammar.tool_calls import (
    ThinkTags,
    ToolSchema,
    enforcement_error,
    tool_call_grammar,
    wrap_structured_output,
)
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.spec.tools import OutputParsing, ToolChoiceMode, ToolOptions
from outrider.text.output_parsers.formats import (
    AUTO,
    choose_output_format,
    is_reasoning_open,
)
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import ChatPrompt, GenerateRequest
from outrider_router.config import RouterConfig

logger = logging.getLogger(__name__)

_TAIL_TOKENS: Final = 32
"""Number of tokens at the end of a prompt in which the tags of reasoning are looked for."""


class AnswerFormat:
    """Formats in which the served model writes tool calls and reasoning."""

    def __init__(self, tokenizer: Tokenizer, config: RouterConfig) -> None:
        """Create the formats of a model. Logs a warning if the operator has set a format of tool
        calls, and the chat template does not show tools to the model."""
        self._tokenizer = tokenizer
        self._format = choose_output_format(
            tokenizer.template_source,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._special_ids = tokenizer.special_ids(self._format.markers)
        traits = tokenizer.template_traits(with_tools=True)
        self._has_single_calls = traits.has_single_calls
        is_set = self._format.tools is not None and config.tool_call_parser != AUTO
        if is_set and not traits.renders_tools:
            logger.warning(
                "tools left out of prompts: the chat template does not use the variable `tools`",
                extra={"tool_call_parser": config.tool_call_parser},
            )

    def describe_parsing(
        self, request: GenerateRequest, prompt_ids: Sequence[int], *, call_id_seed: int
    ) -> OutputParsing | None:
        """Return how the answer to a request with these prompt ids is parsed; None for prompts
        other than conversations, and if there is nothing to parse. `call_id_seed`: a random number
        of 63 bits.

        Raises InvalidRequestError if the request has tools and the model has no format for calls,
        or if it has a structured output beside calls that are enforced.
        """
        if not isinstance(request.prompt, ChatPrompt):
            return None
        tools, reasoning = self._format.tools, self._format.reasoning
        if not _wants_calls(request.prompt.tools):
            tools = None
        elif tools is not None and request.structured_output is not None:
            if request.prompt.tools.choice is not ToolChoiceMode.AUTO:
                raise InvalidRequestError(
                    "a structured output cannot be combined with a tool choice that enforces "
                    "calls; use tool_choice auto or none",
                    reason="INVALID_TOOLS",
                    param="tool_choice",
                )
            # The grammar leaves no room for calls.
            tools = None
        elif tools is None:
            raise InvalidRequestError(
                "tools cannot be used with this model: its chat template has no known format of "
                "tool calls; an operator can set tool_call_parser",
                reason="UNSUPPORTED",
                param="tools",
            )
        if tools is None and reasoning is None:
            return None
        return OutputParsing(
            tool_format="" if tools is None else tools.name,
            reasoning_format="" if reasoning is None else reasoning.name,
            is_reasoning_open=reasoning is not None
            and is_reasoning_open(reasoning, self._tail(prompt_ids)),
            parallel=self._allows_parallel(request.prompt.tools),
            tool_names=tuple(tool.name for tool in request.prompt.tools.tools)
            if tools is not None and tools.needs_names
            else (),
            call_id_seed=call_id_seed,
        )

    def thinking_budget(
        self, request: GenerateRequest, parsing: OutputParsing | None
    ) -> ThinkingBudget | None:
        """Return the limit of the reasoning that a request asks for; None if it asks for none.

        Raises InvalidRequestError if the model's reasoning cannot be limited.
        """
        if not isinstance(request.prompt, ChatPrompt):
            return None
        max_tokens, reasoning = request.prompt.thinking_token_budget, self._format.reasoning
        if max_tokens is None:
            return None
        if reasoning is None or parsing is None:
            raise _unsupported_budget(
                "its chat template has no known format of reasoning; an operator can set "
                "reasoning_parser"
            )
        if reasoning.is_harmony:
            raise _unsupported_budget(
                f"the reasoning of the format {reasoning.name} is not between tags; "
                "reasoning_effort is supported"
            )
        is_open = parsing.is_reasoning_open
        return ThinkingBudget(
            max_tokens=max_tokens,
            open_tag="" if is_open else reasoning.open_tag,
            open_ids=() if is_open else self._tag_ids(reasoning.open_tag),
            close_tag=reasoning.close_tag,
            close_ids=self._tag_ids(reasoning.close_tag),
        )

    def _tag_ids(self, tag: str) -> tuple[int, ...]:
        if tag in self._special_ids:
            return (self._special_ids[tag],)
        return self._tokenizer.encode(tag, add_special_tokens=False)

    def make_grammar(
        self,
        prompt: ChatPrompt,
        structured: StructuredOutput | None,
        parsing: OutputParsing,
        prompt_ids: Sequence[int],
    ) -> StructuredOutput | None:
        """Return what the grammar of an answer enforces: the calls that the tool choice needs, or
        `structured`, the request's own structured output, with reasoning allowed before it; None if
        nothing is enforced. Raises InvalidRequestError for schemas of tools that cannot be
        enforced."""
        think, tools = self._think_tags(parsing, prompt_ids), prompt.tools
        if parsing.tool_format and tools.choice in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
            grammar = tool_call_grammar(
                parsing.tool_format,
                _enforced_tools(tools),
                parallel=self._allows_parallel(tools) and tools.choice is ToolChoiceMode.REQUIRED,
                special_ids=self._special_ids,
                think=think,
            )
            return StructuredOutput(StructuredKind.GRAMMAR, grammar)
        if structured is None or think is None:
            return structured
        return wrap_structured_output(structured, special_ids=self._special_ids, think=think)

    def grammar_error(
        self, prompt: ChatPrompt, grammar: StructuredOutput, error: InvalidRequestError
    ) -> InvalidRequestError:
        """Return the error for the tools of a request, whose grammar, the result of `make_grammar`,
        cannot be compiled. `error`: the compiler's error."""
        return enforcement_error(grammar.text, _enforced_tools(prompt.tools), error)

    def _allows_parallel(self, options: ToolOptions) -> bool:
        # The client could not send an answer of several calls back in the conversation.
        return options.parallel and not self._has_single_calls

    def _think_tags(self, parsing: OutputParsing, prompt_ids: Sequence[int]) -> ThinkTags | None:
        """Return the tags of the reasoning that may precede an answer; None if there is none."""
        reasoning = self._format.reasoning
        if reasoning is None:
            return None
        if self._tail(prompt_ids).rstrip().endswith(reasoning.close_tag):
            return None
        return ThinkTags(
            open_tag=reasoning.open_tag,
            close_tag=reasoning.close_tag,
            is_open=parsing.is_reasoning_open,
        )

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], with_special=True)


def _unsupported_budget(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"thinking_token_budget cannot be used with this model: {why}",
        reason="UNSUPPORTED",
        param="thinking_token_budget",
    )


def _enforced_tools(options: ToolOptions) -> list[ToolSchema]:
    return [
        ToolSchema(name=tool.name, parameters=tool.parameters, index=index)
        for index, tool in enumerate(options.tools)
        if options.choice is ToolChoiceMode.REQUIRED or tool.name == options.named
    ]


def _wants_calls(options: ToolOptions) -> bool:
    return bool(options.tools) and options.choice is not ToolChoiceMode.NONE
