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
    """Log-probability of an emitted token, and the most probable token ids at its position."""

    logprob: float
    """Natural logarithm of the probability of the emitted token."""
    top: tuple[tuple[int, float], ...] = ()
    """Most probable token ids at the token's position, as pairs (id, log-probability), the most
    probable first. The emitted token may be among them.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventLogprobs:
    """Log-probabilities of the tokens of a `SessionEvents` message, as columns.

    n is the number of rows of the message, and `counts` is its column with the number of tokens of
    each row.
    """

    widths: NDArray[np.uint8]
    """Number of log-probabilities for each token of a row, [n]: 0 if the row has none, otherwise 1
    plus the number of most probable ids.
    """
    values: NDArray[np.float32]
    """Log-probabilities, [sum(counts * widths)], row by row and token by token: first that of the
    emitted token, then those of the most probable ids, the most probable first.
    """
    top_ids: NDArray[np.int32]
    """The most probable token ids, [sum(counts * (widths - 1))], in the order of `values`. Rows
    with width 0 have none.
    """

    def split_rows(self, counts: Sequence[int]) -> Iterator[list[TokenLogprobs]]:
        """Yield a list for each row with the log-probabilities of its tokens. The list is empty if
        the row has none. `counts` is the number of tokens of each row.
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
    """Return the log-probabilities of the tokens of one row of `EventLogprobs`. The arguments are
    the row's parts of its columns.
    """
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
    """Return the parts of one row for the columns `values` and `top_ids` of `EventLogprobs`.
    `entries` are the row's tokens, which must all have the same number of most probable ids.
    """
    values: list[float] = []
    top_ids: list[int] = []
    for entry in entries:
        values.append(entry.logprob)
        for token, value in entry.top:
            top_ids.append(token)
            values.append(value)
    return values, top_ids
