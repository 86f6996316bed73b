"""Draft shape controller: the shape of in-process drafts with the most expected tokens per second.
Pure.

All sessions of a round share its shape. The time of a round by shape and load is measured at the
start, and what the host adds to it is the same for all shapes. Tokens of a row depend on the text
and hardly on the load. Those of a shape that is not in force are what it gave last, where that is
fresh, and otherwise what the shape in force gives now, times the usual ratio of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from outrider.speculation.measurements import EmissionStats

TREE_OVER_CHAIN: Final = 1.3
"""Tokens a round of a tree of 16 nodes over those of a chain of 4, where nothing is measured:
SmolLM2-135M with its head, 40 chat prompts (4.1 to 4.7 and 3.0 to 3.3 at temperature 0)."""
MIN_SWITCH_GAIN: Final = 1.03
"""What another shape must gain to be taken."""
MIN_ROUNDS: Final = 24.0
MIN_ROWS: Final = 48.0
"""Rounds, and rows of these, of the shape in force before it is left."""
HALF_LIFE_ROUNDS: Final = 256.0
"""Rounds of a shape after which its rows count half."""
MEMORY_ROUNDS: Final = 4096.0
"""Rounds of other shapes after which they do: a shape that lost is tried again some time, as the
text may have changed."""


class DraftShapeTimes(NamedTuple):
    """A shape that drafts may have, and what a round of it takes."""

    num_nodes: int
    """Nodes of a row, the root included; it names the shape."""
    is_tree: bool
    seconds: float
    """Of the device, for a round at the present load."""


class DraftShapeController:
    """Chooses the draft shape of all sessions of a verifier."""

    def __init__(self) -> None:
        self._emitted: dict[int, EmissionStats] = {}
        """What rows emitted, by the nodes of the shape."""
        self._rounds = 0.0
        """Rounds of the shape in force since it is that."""
        self._rows = 0.0
        self._num_nodes = 0
        """The shape in force; 0: none was chosen."""

    def observe_round(self, num_nodes: int, rows: int, tokens: int, squares: int) -> None:
        """In a round of a shape so many rows with drafts emitted `tokens`, the sum of their squares
        being `squares`."""
        if rows < 1:
            return
        for nodes, stats in self._emitted.items():
            stats.decay(1.0 / (HALF_LIFE_ROUNDS if nodes == num_nodes else MEMORY_ROUNDS))
        self._emitted.setdefault(num_nodes, EmissionStats()).add_rows(rows, tokens, squares, 1.0)
        if num_nodes == self._num_nodes:
            self._rounds += 1.0
            self._rows += rows

    def choose_shape(self, shapes: Sequence[DraftShapeTimes], host_s: float) -> int:
        """The nodes of the shape that the next rounds should have, the root included: one of
        `shapes`, which are those that the present load allows, the usual one first. `host_s`: what
        a round takes beyond the device's time."""
        if not shapes:
            return self._take(0)
        known = {shape.num_nodes: shape for shape in shapes}
        current = known.get(self._num_nodes)
        if current is None:
            # The first choice, or one that the load has ruled out.
            return self._take(shapes[0].num_nodes)
        if self._rounds < MIN_ROUNDS or self._rows < MIN_ROWS:
            return current.num_nodes
        rate = self._tokens_of(current, current) / (current.seconds + host_s)
        best, best_rate = current, MIN_SWITCH_GAIN * rate
        for shape in shapes:
            other_rate = self._tokens_of(shape, current) / (shape.seconds + host_s)
            if shape is not current and other_rate > best_rate:
                best, best_rate = shape, other_rate
        return self._take(best.num_nodes)

    def _take(self, num_nodes: int) -> int:
        if num_nodes != self._num_nodes:
            self._num_nodes, self._rounds, self._rows = num_nodes, 0.0, 0.0
        return num_nodes

    def _tokens_of(self, shape: DraftShapeTimes, current: DraftShapeTimes) -> float:
        """Tokens a row that a shape is expected to give on the text of now."""
        now = self._emitted[current.num_nodes].mean
        if shape is current:
            return now
        usual = 1.0
        if shape.is_tree != current.is_tree:
            usual = TREE_OVER_CHAIN if shape.is_tree else 1.0 / TREE_OVER_CHAIN
        stats = self._emitted.get(shape.num_nodes)
        if stats is None or not stats.rows > 0.0:
            return usual * now
        weight = stats.rows / (stats.rows + MIN_ROWS)
        return weight * stats.mean + (1.0 - weight) * usual * now
