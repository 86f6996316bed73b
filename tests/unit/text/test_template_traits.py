"""A template's traits follow from how it renders tools and tool calls.

The templates here are written in the manner of published ones; each names the family.
"""

from __future__ import annotations

import json

import pytest

from outrider.text.chat import ChatTemplate
from outrider.text.template_traits import TemplateTraits, find_traits

QWEN = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
)
QWEN_3 = QWEN.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}{{ '<call>' + c['function']['name'] + '\\n```json\\n'"
    " + c['function']['arguments'] + '\\n```' }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
DEEPSEEK_31 = (
    "{% for m in messages %}{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + '<sep>' + c['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
PYTHONIC = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    "{% endfor %}){% endfor %}{{ m.content }}{% endfor %}{% if tools is defined %}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids') }}{% endif %}{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% for tool in tools %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if tools is defined %}{% endif %}"
)
HARMONY = (
    "<|channel|>{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls %}to=functions.{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
)
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN, TemplateTraits(renders_tools=True)),
        (QWEN_3, TemplateTraits(renders_tools=True)),
        (DEEPSEEK, TemplateTraits(has_text_arguments=True, has_null_content=True)),
        (DEEPSEEK_31, TemplateTraits(renders_tools=True, has_text_arguments=True)),
        (PYTHONIC, TemplateTraits(renders_tools=True)),
        (MISTRAL, TemplateTraits(renders_tools=True, has_short_ids=True)),
        (LLAMA_3, TemplateTraits(renders_tools=True, has_single_calls=True)),
        (HARMONY, TemplateTraits(renders_tools=True, is_harmony=True)),
        (NO_TOOLS, TemplateTraits()),
        ("{{ raise_exception('never') }}", TemplateTraits()),
    ],
    ids=[
        *(
            "qwen2",
            "qwen3",
            "deepseek-v3",
            "deepseek-v3.1",
            "llama4",
            "mistral",
            "llama3",
            "gpt-oss",
        ),
        *("no tools", "refuses"),
    ],
)
def test_the_form_that_a_template_reads_is_found(source: str, expected: TemplateTraits) -> None:
    assert find_traits(source, ChatTemplate(source, {})) == expected


def test_arguments_are_not_rendered_as_a_text_inside_a_text() -> None:
    rendered = ChatTemplate(QWEN, {}).render(
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
            }
        ]
    )
    assert json.loads(rendered.split("<tool_call>")[1].split("</tool_call>")[0]) == {
        "name": "f",
        "arguments": {"a": 1},
    }
