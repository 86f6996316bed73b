"""From a configuration to a loaded target and a service (torch is imported here)."""

from __future__ import annotations

import gc
import logging
import sys
import time

import torch

from outrider.engine.heads import load_feature_projection
from outrider.engine.linear import make_linear
from outrider.engine.loading import load_target
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.models import resolve
from outrider.text.tokenizer import tokenizer_hash
from outrider_verifier.config import VerifierConfig
from outrider_verifier.engine import Projection
from outrider_verifier.service import VerifierService

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms is longer than a round may take outside its forward: a thread that waits
for the interpreter lock would stall the other by that much."""


def build_service(config: VerifierConfig) -> VerifierService:
    """Load everything that `config` names. Raises InvalidRequestError, NotFoundError or
    FailedPreconditionError where the parts do not fit together."""
    if not config.model:
        raise InvalidRequestError("`model` must be given", reason="INVALID_CONFIG")
    if config.threads:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    path = resolve(config.model)
    dtype = getattr(torch, config.dtype)
    target = load_target(
        path,
        dtype=dtype,
        device=config.device,
        kv_tokens=config.kv_tokens,
        block_tokens=config.kv_block_tokens,
    )
    projection: Projection | None = None
    if config.features_from:
        projection = _load_projection(config, target.config.num_layers)
    seconds = round(time.monotonic() - began, 2)
    logger.info("target loaded", extra={"model": str(path), "seconds": seconds})
    return VerifierService(
        config,
        target,
        projection,
        pool=target.pool,
        max_context_len=target.config.max_position_embeddings,
        model_name=config.model,
        tokenizer_hash=tokenizer_hash(path),
    )


def tune_interpreter() -> None:
    """Settings for a process that does nothing but serve; call it once the model is loaded."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The model stays for the life of the process: keep the collector from walking over it.
    gc.collect()
    gc.freeze()


def _load_projection(config: VerifierConfig, num_layers: int) -> Projection:
    try:
        projection = load_feature_projection(
            config.features_from,
            num_target_layers=num_layers,
            dtype=getattr(torch, config.dtype),
            device=config.device,
            make_linear=make_linear,
        )
    except (ValueError, OSError) as error:
        message = f"features_from {config.features_from}: {error}"
        raise InvalidRequestError(message, reason="INVALID_HEAD") from error
    _check_taps(projection, num_layers)
    return projection


def _check_taps(projection: Projection, num_layers: int) -> None:
    if any(tap >= num_layers for tap in projection.tap_layers):
        raise FailedPreconditionError(
            f"the head taps layers {projection.tap_layers}, the target has {num_layers}",
            reason="FEATURE_MISMATCH",
        )
