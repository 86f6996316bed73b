"""SVG rendering of a timeline: one row per track, one bar per span, a scale in milliseconds.

A span of length 0 is drawn as a mark instead of a bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from outrider_bench.gpu.support.trace import TrackSpan

_LEFT, _TOP, _ROW, _BAR = 172, 56, 44, 26
_INSET, _MOST_DEPTH = 5, 2
"""Pixels by which a nested bar is lowered per level, and the maximum number of levels."""
COLOURS = (
    *("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5"),
    *("#ff8ab7", "#1f7a8c", "#8c8c1f", "#7d4e57", "#5b5f97", "#c05621"),
)
_IDLE = "#c8c8c8"
"""Colour of idle spans, whose names begin with "wait"."""
_MIN_LABEL_PX = 7.0
"""Approximate width of a letter in pixels. A bar that is too short for the name of its span has no
label."""


def draw(
    spans: Sequence[TrackSpan], tracks: Sequence[str], *, title: str, width: int = 1200
) -> str:
    """Return the timeline as SVG text. Raises ValueError without spans."""
    if not spans:
        raise ValueError("a timeline needs at least one span")
    start = min(span.start_ms for span in spans)
    length = max(max(span.end_ms for span in spans) - start, 1e-6)
    scale = (width - _LEFT - 20) / length
    names = list(dict.fromkeys(span.name for span in spans))
    busy = [name for name in names if not name.startswith("wait")]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(busy)}
    colours |= {name: _IDLE for name in names if name not in colours}
    bottom = _TOP + _ROW * len(tracks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 64}" '
        f'viewBox="0 0 {width} {bottom + 64}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 64}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
        *_scale(length, scale, bottom),
    ]
    for index, track in enumerate(tracks):
        y = _TOP + index * _ROW
        parts.append(f'<text x="12" y="{y + _BAR / 2 + 4:.0f}">{escape(track)}</text>')
        for span, depth in _nested([span for span in spans if span.track == track]):
            x, colour = _LEFT + (span.start_ms - start) * scale, colours[span.name]
            mark = _moment if span.ms == 0.0 else _bar
            parts += mark(span, x, scale, y + min(depth, _MOST_DEPTH) * _INSET, colour)
    return "\n".join([*parts, *_legend(colours, bottom + 44), "</svg>"]) + "\n"


def write_svg(path: Path, spans: Sequence[TrackSpan], tracks: Sequence[str], *, title: str) -> None:
    """Write the timeline to an SVG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(spans, tracks, title=title), encoding="utf-8")


def _nested(spans: Sequence[TrackSpan]) -> Iterator[tuple[TrackSpan, int]]:
    """Yield the spans of a track, outer ones first, each with the number of spans that contain
    it."""
    around: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start_ms, -span.end_ms)):
        while around and around[-1] < span.end_ms:
            around.pop()
        yield span, len(around)
        around.append(span.end_ms)


def _moment(span: TrackSpan, x: float, _: float, y: int, colour: str) -> list[str]:
    tip, left, right = y - 2, x - 4, x + 4
    return [
        f'<path d="M{x:.2f} {tip}V{y + _BAR}M{left:.2f} {tip - 6}H{right:.2f}L{x:.2f} {tip}Z" '
        f'fill="{colour}" stroke="{colour}"><title>{escape(span.name)}</title></path>'
    ]


def _bar(span: TrackSpan, x: float, scale: float, y: int, colour: str) -> list[str]:
    width = max(span.ms * scale, 0.5)
    label = f"{span.name} {span.ms * 1000:.0f} us"
    bar = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{colour}" '
        f'fill-opacity="0.85"><title>{escape(label)}</title></rect>'
    )
    if width < _MIN_LABEL_PX * len(span.name):
        return [bar]
    text_y = y + _BAR / 2 + 4
    return [bar, f'<text x="{x + 4:.2f}" y="{text_y:.0f}" fill="#fff">{escape(span.name)}</text>']


def _scale(length: float, scale: float, bottom: int) -> list[str]:
    step = _round_step(length / 8)
    parts = []
    for index in range(int(length / step) + 1):
        x = _LEFT + index * step * scale
        parts.append(f'<path d="M{x:.1f} {_TOP - 10}V{bottom}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle" fill="#666">'
            f"{index * step:g} ms</text>"
        )
    return parts


def _round_step(rough: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 1.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _legend(colours: dict[str, str], y: int) -> list[str]:
    parts, x = [], _LEFT
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(name)}</text>')
        x += 34 + 8 * len(name)
    return parts
