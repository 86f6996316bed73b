# mypy: disable-error-code="no-untyped-call"
"""Capturing and timing every shape of a family before the first request."""

from __future__ import annotations

import logging
import time

import torch

from outrider.engine.device.rounds import DeviceRounds
from outrider.engine.device.shapes import RoundShape

logger = logging.getLogger(__name__)

_REPEATS = 3
_PROGRESS_S = 5.0


def warm_up(rounds: DeviceRounds, device: torch.device) -> dict[RoundShape, float]:
    """Seconds of every shape; says how far it is, and what it took in time and memory."""
    began = said = time.monotonic()
    free, _ = torch.cuda.mem_get_info(device)
    shapes = list(rounds.family.shapes())
    times: dict[RoundShape, float] = {}
    # The largest first: what a graph needs for a while is then there for all that follow.
    for done, shape in enumerate(sorted(shapes, key=lambda s: s.token_rows, reverse=True)):
        rounds.warm_up(shape)
        times[shape] = _time(rounds, shape)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            logger.info("capturing rounds", extra={"done": done + 1, "of": len(shapes)})
    if rounds.form_drafts is not None:
        rounds.form_drafts.warm_up()
    rounds.graphs.sealed = True
    left, _ = torch.cuda.mem_get_info(device)
    logger.info(
        "rounds captured",
        extra={
            "shapes": len(shapes),
            "seconds": round(time.monotonic() - began, 1),
            "mebibytes": (free - left) >> 20,
        },
    )
    return times


def _time(rounds: DeviceRounds, shape: RoundShape) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        rounds.warm_up(shape)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000.0 / _REPEATS
