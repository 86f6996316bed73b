# mypy: disable-error-code="no-untyped-call"
"""Warm-up: compiles, captures and times every shape of a `ShapeFamily` before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import groupby, pairwise

import numpy as np
import torch

from outrider.engine.device.graphs.kernel_compilation import compile_kernels
from outrider.engine.device.graphs.shapes import RoundShape, bucket_for
from outrider.engine.device.round_launcher import RoundLauncher
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, SPLIT_NORM_ROWS

logger = logging.getLogger(__name__)

_REPEATS = 2
"""Number of runs for each timing of a shape."""
_LONG_ROWS = 1024
"""Number of token rows above which a round is timed only once. Such a round is so long that delays
hardly matter, and a second timing would take seconds of startup."""
_PROGRESS_S = 5.0
_ROW_TILES = (16, SPLIT_NORM_ROWS, SKINNY_ROWS)
"""Bucket limits of token rows; within a bucket the matrix products of rounds use the same
kernels."""


def compile_shapes(
    rounds: RoundLauncher, device: torch.device, check: Callable[[], None] | None = None
) -> None:
    """Compile most kernels of all shapes in advance. The weights need not be loaded yet.

    Shapes that use nearly the same kernels form a group, and one shape of each group is compiled.
    The few kernels that only other shapes of the group use are compiled later, by `warm_up_shapes`.
    `check`: function that is called before each shape and may raise an error to abort.
    """

    def run(wait_cached: Callable[[], bool]) -> None:
        is_cached = True
        for group in representative_shapes(rounds.family.all_shapes()):
            for shape in group:
                if check is not None:
                    check()
                rounds.warm_up(shape)
                # After a missing kernel `wait_cached` is no longer called, because the threads
                # are busy compiling.
                is_cached = is_cached and wait_cached()
                if is_cached:
                    # An earlier start of the process has compiled the kernels of this kind of
                    # round.
                    break
        if rounds.form_drafts is not None:
            rounds.form_drafts.warm_up()

    compile_kernels(rounds.graphs, device, run)


def representative_shapes(shapes: Iterable[RoundShape]) -> list[list[RoundShape]]:
    """Return the largest shape of each group of shapes that use nearly the same kernels. There is
    one list for each combination of draft kind, acceptance mode and `has_features`."""
    kinds: dict[Hashable, dict[Hashable, RoundShape]] = {}
    for shape in sorted(shapes, key=lambda s: s.token_rows):
        tile = bucket_for(min(shape.token_rows, SKINNY_ROWS + 1), _ROW_TILES)
        group = shape.nodes, shape.rows > 0, shape.chunks > 0, tile
        kinds.setdefault(_kind(shape), {})[group] = shape
    return [list(groups.values()) for groups in kinds.values()]


def warm_up_shapes(rounds: RoundLauncher, device: torch.device) -> dict[RoundShape, float]:
    """Compile and capture all shapes. Return a dictionary from each shape to the duration of its
    round in seconds. Progress, total time and memory are logged."""
    began = said = time.monotonic()
    free, _ = torch.cuda.mem_get_info(device)
    shapes = list(rounds.family.all_shapes())
    times: dict[RoundShape, float] = {}
    # The largest shape comes first, so that later graphs can reuse its temporary memory.
    for done, shape in enumerate(sorted(shapes, key=lambda s: s.token_rows, reverse=True)):
        rounds.warm_up(shape)
        times[shape] = _time(rounds, shape)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            # The first shapes compile kernels for all, so this estimate is rather too long.
            left_s = (said - began) / (done + 1) * (len(shapes) - done - 1)
            facts = {"done": done + 1, "of": len(shapes), "seconds_left": round(left_s)}
            logger.info("capturing rounds", extra=facts)
    if rounds.form_drafts is not None:
        rounds.form_drafts.warm_up()
    rounds.graphs.sealed = True
    # A second timing later: a delay of one shape may have delayed its neighbours, too.
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
    """Return the shortest duration of a few consecutive runs, in seconds."""
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
    """Return the durations `times` in seconds, corrected so that no shape takes longer than a
    larger one.

    The duration of a shape is reduced to that of any shape that has the same draft kind, acceptance
    mode and `has_features` and is at least as large in every dimension. A longer measurement must
    have been disturbed by other users of the device, for example a drafter that captured its own
    graphs.
    """
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
