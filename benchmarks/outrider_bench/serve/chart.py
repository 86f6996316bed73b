"""Chart of tokens/s by number of sessions: one line per placement and draft setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider_bench.gpu.support.svg import COLOURS
from outrider_bench.serve.cells import PLAIN, handicap_of

_WIDTH, _HEIGHT = 820, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 250, 48, 50
_STEPS: Final = (1, 2, 5)

ChartLine = list[tuple[int, float]]
"""Pairs of (sessions, tokens/s), by ascending number of sessions."""


def chart_lines(cells: Sequence[dict[str, Any]]) -> dict[str, ChartLine]:
    """Return the lines of the chart by their names, plain decoding first.

    Only cells with the most common model and sampling parameters are included. Raises
    InvalidRequestError if no cell was measured in a closed loop.
    """
    closed = [cell for cell in cells if cell["sessions"] and cell["tokens_per_s"]]
    if not closed:
        raise InvalidRequestError("there is no closed loop to draw", reason="NO_RESULTS")
    chosen = _commonest(closed)
    found: dict[str, ChartLine] = {}
    for cell in sorted(closed, key=lambda cell: (cell["placement"] != PLAIN, cell["sessions"])):
        plain = cell["placement"] == PLAIN
        # Plain decoding draws alike under every rule.
        if _kind(cell) == chosen[0] and (plain or cell["rule"] == chosen[1]):
            busy_cores = (
                f" ({cell['busy_polling_cores']} busy-polling cores)"
                if cell["busy_polling_cores"]
                else ""
            )
            name = PLAIN if plain else f"{cell['placement']}, {cell['drafts']}"
            name += busy_cores + handicap_of(cell)
            found.setdefault(name, []).append((cell["sessions"], cell["tokens_per_s"]))
    return found


def chart_title(cells: Sequence[dict[str, Any]]) -> str:
    """Return the title of the chart, with the model and the sampling parameters of its cells."""
    (model, max_tokens, temperature, top_p, *_), rule = _commonest(cells)
    drawn = "greedy" if temperature == 0.0 else f"T = {temperature:g}, top_p = {top_p:g}, {rule}"
    return f"{model}: tokens/s by sessions, {drawn}, answers up to {max_tokens} tokens"


def write_chart(path: Path, cells: Sequence[dict[str, Any]]) -> None:
    """Write the chart as SVG. Raises InvalidRequestError if there is nothing to draw."""
    text = draw_chart(chart_lines(cells), chart_title(cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def draw_chart(found: dict[str, ChartLine], heading: str) -> str:
    """Return the chart of the lines `found` as SVG text. Both axes are logarithmic, and the line of
    plain decoding is dashed."""
    points = [point for line in found.values() for point in line]
    xs = sorted({sessions for sessions, _ in points})
    low, high = min(y for _, y in points) / 1.2, max(y for _, y in points) * 1.2
    across = _Axis(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT)
    up = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15">{escape(heading)}</text>',
        *_grid(xs, across, up),
    ]
    for index, (name, line) in enumerate(found.items()):
        parts += _line(name, line, COLOURS[index % len(COLOURS)], index, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """Logarithmic axis that maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Return the pixel of a value, or the middle of the axis if the axis has a single value."""
        if self.high <= self.low:
            return (self._start + self._end) / 2
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return the tick values within the axis: 1, 2 and 5 times powers of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [step * 10.0**power for power in powers for step in _STEPS]
        return [value for value in every if self.low <= value <= self.high]


def _grid(xs: Sequence[int], across: _Axis, up: _Axis) -> list[str]:
    parts, bottom = [], _HEIGHT - _BOTTOM
    for sessions in xs:
        x = across.at(sessions)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#666">'
            f"{sessions}</text>"
        )
    for value in up.ticks():
        y = up.at(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{value:,g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle" fill="#666">'
        "sessions at a time</text>"
    )
    return parts


def _line(
    name: str, line: ChartLine, colour: str, index: int, across: _Axis, up: _Axis
) -> list[str]:
    spots = [(across.at(sessions), up.at(value)) for sessions, value in line]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    dashed = ' stroke-dasharray="6 4"' if name == PLAIN else ""
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>']
    for (x, y), (sessions, value) in zip(spots, line, strict=True):
        label = escape(f"{name}, {sessions}: {value:,.0f} tokens/s")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{label}</title>'
            "</circle>"
        )
    x, y = _WIDTH - _RIGHT + 16, _TOP + 12 + 20 * index
    parts.append(
        f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"{dashed}/>'
        f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>'
    )
    return parts


def _kind(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings of a cell that must be the same for all cells of a chart. The acceptance
    rule is not one of them."""
    names = (
        *("model", "max_tokens", "temperature", "top_p", "min_p"),
        *("repetition_penalty", "logit_bias"),
    )
    return tuple(cell[name] for name in names)


def _commonest(cells: Sequence[dict[str, Any]]) -> tuple[tuple[Any, ...], str]:
    """Return the most common settings (see `_kind`) and acceptance rule of the closed-loop cells
    with drafts, or of all closed-loop cells if none has drafts."""
    closed = [cell for cell in cells if cell["sessions"]]
    drafted = [cell for cell in closed if cell["placement"] != PLAIN] or closed
    kinds = [(_kind(cell), str(cell["rule"])) for cell in drafted]
    return max(dict.fromkeys(kinds), key=kinds.count)
