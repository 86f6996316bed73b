# mypy: disable-error-code="no-untyped-call"
"""Warm-up: captures and times every shape of a `ShapeFamily` before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from itertools import groupby, pairwise

import numpy as np
import torch

from outrider.engine.device.graphs.shapes import RoundShape
from outrider.engine.device.round_launcher import RoundLauncher

logger = logging.getLogger(__name__)

_REPEATS = 2
"""Of a shape at a time."""
_LONG_ROWS = 1024
"""Token rows from which a round is timed once: it lasts so long that little can hold it up, and the
start would be longer by seconds."""
_PROGRESS_S = 5.0


def warm_up_shapes(rounds: RoundLauncher, device: torch.device) -> dict[RoundShape, float]:
    """Seconds of every shape; says how far it is, and what it took in time and memory."""
    began = said = time.monotonic()
    free, _ = torch.cuda.mem_get_info(device)
    shapes = list(rounds.family.all_shapes())
    times: dict[RoundShape, float] = {}
    # The largest first: what a graph needs for a while is then there for all that follow.
    for done, shape in enumerate(sorted(shapes, key=lambda s: s.token_rows, reverse=True)):
        rounds.warm_up(shape)
        times[shape] = _time(rounds, shape)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            # The first shapes compile the kernels of all, so that this is rather too long.
            left_s = (said - began) / (done + 1) * (len(shapes) - done - 1)
            facts = {"done": done + 1, "of": len(shapes), "seconds_left": round(left_s)}
            logger.info("capturing rounds", extra=facts)
    if rounds.form_drafts is not None:
        rounds.form_drafts.warm_up()
    rounds.graphs.sealed = True
    # Once more, later: what held one shape up, held its neighbours up as well.
    for shape in shapes:
        if shape.token_rows <= _LONG_ROWS:
            times[shape] = min(times[shape], _time(rounds, shape))
    left, _ = torch.cuda.mem_get_info(device)
    logger.info(
        "rounds captured",
        extra={
            "shapes": len(shapes),
            "seconds": round(time.monotonic() - began, 1),
            "mebibytes": (free - left) >> 20,
        },
    )
    return smooth_times(times)


def _time(rounds: RoundLauncher, shape: RoundShape) -> float:
    """Of some repeats in a row the one that was held up least."""
    repeats = _REPEATS if shape.token_rows <= _LONG_ROWS else 1
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + repeats)]
    ends[0].record()
    for end in ends[1:]:
        rounds.warm_up(shape)
        end.record()
    ends[-1].synchronize()
    milliseconds: float = min(start.elapsed_time(end) for start, end in pairwise(ends))
    return milliseconds / 1000.0


def smooth_times(times: Mapping[RoundShape, float]) -> dict[RoundShape, float]:
    """Seconds of every shape, none longer than those of a shape that has the same and more in it.

    Whoever else used the device while a shape was timed, a drafter that captured its own graphs for
    one, can only have made it look slower."""
    cleared: dict[RoundShape, float] = {}
    for _, alike in groupby(sorted(times, key=_kind), key=_kind):
        shapes = list(alike)
        sizes = np.array([(shape.rows, shape.nodes, shape.chunks) for shape in shapes])
        seconds = np.array([times[shape] for shape in shapes])
        contained = (sizes[:, None] <= sizes[None]).all(axis=-1)
        least = np.where(contained, seconds, np.inf).min(axis=1)
        cleared |= zip(shapes, least.tolist(), strict=True)
    return cleared


def _kind(shape: RoundShape) -> tuple[str, str, bool]:
    return shape.draft_kind, shape.acceptance_mode, shape.has_features
