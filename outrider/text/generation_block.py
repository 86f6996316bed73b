"""Jinja extension for the `{% generation %}` block of chat templates.

Training code uses the block to find the assistant's tokens. In serving, the block has no effect:
its content is rendered as usual.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """Renders the content between `{% generation %}` and `{% endgeneration %}` in place."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block. Variables that are set inside are not visible outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
