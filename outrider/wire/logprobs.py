"""Log-probabilities of emitted tokens: per token, and as columns of a round's events.

All are natural logarithms of the softmax of the target's logits, before temperature, penalties,
biases and masks, in [LOWEST_LOGPROB, 0].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of an emitted token and its most probable alternatives."""

    logprob: float
    """Natural logarithm of the probability of the emitted token."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the most probable ids at the token's position, the most probable
    first; the emitted id may be among them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventLogprobs:
    """Log-probabilities of the ids of `SessionEvents`, in columns for its n rows."""

    widths: NDArray[np.uint8]
    """Number of values per id of each row, [n]: 0 for none, else 1 plus the number of most probable
    ids.
    """
    values: NDArray[np.float32]
    """Log-probabilities, [sum(counts * widths)], row by row and id by id: first that of the emitted
    id, then those of the most probable ids, the most probable first.
    """
    top_ids: NDArray[np.int32]
    """The most probable ids, [sum(counts * (widths - 1))] over rows whose width is not 0."""

    def split_rows(self, counts: Sequence[int]) -> Iterator[list[TokenLogprobs]]:
        """Yield, for each row, the log-probabilities of its ids, or an empty list. `counts` is the
        number of ids of each row.
        """
        values, top_ids = self.values.tolist(), self.top_ids.tolist()
        value = top = 0
        for count, width in zip(counts, self.widths.tolist(), strict=True):
            if not width:
                yield []
                continue
            end, top_end = value + count * width, top + count * (width - 1)
            yield unpack_logprobs(width, values[value:end], top_ids[top:top_end])
            value, top = end, top_end


def unpack_logprobs(
    width: int, values: Sequence[float], top_ids: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a row of `EventLogprobs` with `width` values per id."""
    others = width - 1
    return [
        TokenLogprobs(
            values[at],
            tuple(
                zip(
                    top_ids[place * others : (place + 1) * others],
                    values[at + 1 : at + width],
                    strict=True,
                )
            ),
        )
        for place, at in enumerate(range(0, len(values), width))
    ]


def pack_logprobs(entries: Sequence[TokenLogprobs]) -> tuple[list[float], list[int]]:
    """Return the values and most probable ids of log-probabilities with equal widths, as stored in
    a row of `EventLogprobs`.
    """
    values: list[float] = []
    top_ids: list[int] = []
    for entry in entries:
        values.append(entry.logprob)
        for token, value in entry.top:
            top_ids.append(token)
            values.append(value)
    return values, top_ids
