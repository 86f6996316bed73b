"""Output parsers: split the text of an answer into reasoning, content and tool calls.

They are state machines over pieces of text, and they use nothing but the standard library. Models
write reasoning and tool calls in formats of their own; `formats` names them as vLLM does.

call_readers.py            Readers of tool calls in the text behind a marker that begins them.
content.py                 Content of an answer beside its tool calls, without the white space that
                           separates them.
events.py                  Events of an output parser: pieces of reasoning, of content and of tool
                           calls.
formats.py                 Formats of tool calls and of reasoning: which parser reads them, and
                           which templates use them.
harmony.py                 Output parser of OpenAI's harmony format, in which gpt-oss models answer.
json_call.py               Reads one tool call that is written as a JSON object with a name and
                           arguments.
json_value.py              Finds the end of one JSON value in text that arrives in pieces.
leading_calls.py           Output parser of tool calls with which an answer begins, without a marker
                           of their own.
marked_calls.py            Output parser of tool calls that begin with a marker.
markers.py                 Search for markers, such as `<tool_call>`, in text that arrives in
                           pieces.
plain.py                   Output parser of answers in which no tool calls are looked for.
pythonic_calls.py          Reads tool calls that are written as a list of Python calls, as Llama
                           models may write them.
reasoning.py               Output parser of reasoning between tags, such as `<think>` and
                           `</think>`.
reasoning_span.py          Finds where the reasoning of an answer begins and ends, without changing
                           the text.
stepping.py                Base class of output parsers that process their text in steps.
"""
