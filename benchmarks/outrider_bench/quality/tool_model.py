"""Copy of a model's directory whose chat template renders tools, tool calls and reasoning.

The template is in the style of Qwen's and Hermes's: calls between `<tool_call>` tags, results
between `<tool_response>` tags, reasoning between `<think>` tags.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

TEMPLATE: Final = """\
{%- if messages[0].role == 'system' %}
    {%- set instructions = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set instructions = 'You are a helpful assistant.' %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|im_start|>system\\n' + instructions }}
{%- if reasoning_effort is defined and reasoning_effort != 'none' %}
    {{- '\\nReasoning effort: ' + reasoning_effort }}
{%- endif %}
{%- if tools and names_only %}
    {{- '\\nTools:' }}
    {%- for tool in tools %}
        {{- ' ' + tool.function.name }}
    {%- endfor %}
{%- elif tools %}
    {{- '\\nYou can call these tools:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nWrite a call as\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}' }}
    {{- '\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for turn in turns %}
    {%- if turn.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + turn.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + turn.role + '\\n' }}
        {%- if turn.reasoning_content %}
            {{- '<think>\\n' + turn.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- turn.content }}
        {%- for call in turn.tool_calls or [] %}
            {%- if turn.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined %}
        {{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Chat template. With the variable `enable_thinking`, the answer begins inside the reasoning (true)
or behind it (false); without it, the model decides. With `names_only`, only the names of tools are
rendered, so that a thousand tools make a short prompt."""
_CONFIG_FILES: Final = frozenset({"config.json", "tokenizer_config.json"})


def make_tool_model(source: Path, directory: Path, *, max_model_len: int | None = None) -> Path:
    """Create a directory with links to the files of the model `source` and with `TEMPLATE` as chat
    template, and return it. `max_model_len`: maximum number of tokens of prompt and answer; None
    stands for the model's own. Chat templates in other files than tokenizer_config.json are left
    out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in _CONFIG_FILES and not file.name.startswith("chat_template"):
            (directory / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(directory / "tokenizer_config.json", {**tokenizer, "chat_template": TEMPLATE})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if max_model_len is not None:
        config["max_position_embeddings"] = max_model_len
    _write(directory / "config.json", config)
    return directory


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
