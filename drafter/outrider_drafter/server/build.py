"""Builds the service from a configuration: loads all draft models (torch is imported here)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from outrider.busy_polling import BusyCores
from outrider.checkpoints.head_tensors import read_head
from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoint import load_model_config
from outrider.engine.device.current_device import check_device, set_current_device
from outrider.engine.device.drafting.eagle_weights import can_extract
from outrider.engine.heads import DraftHead, load_head, load_head_config
from outrider.engine.linear import PlainLinear, make_linear
from outrider.engine.matmul_tuning import set_compute_threads
from outrider.engine.model_loader import (
    kv_bytes_per_token,
    load_embedding,
    load_lm_head,
    load_target,
)
from outrider.engine.target import TargetModel
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.grammar_cache import GrammarCache
from outrider.models import resolve_model
from outrider.spec.plan import DraftMethod
from outrider.start_times import StartStage, StartTimes
from outrider.text.tokenizer import tokenizer_file, tokenizer_hash
from outrider_drafter.config import DrafterConfig
from outrider_drafter.hooks import DrafterHooks, VerifierAccess
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.proposers.interface import Proposer
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.proposers.small_model import SmallModelProposer
from outrider_drafter.server.service import DrafterService, TargetIdentity
from outrider_drafter.server.shm_channels import ReplicaTable

if TYPE_CHECKING:
    from outrider_drafter.gpu.proposer import GpuProposer

_HOST_KV_TOKENS: Final = 16384
_MAX_KV_TOKENS: Final = 131072
"""Maximum of `draft_model_kv_tokens` on a GPU when it is chosen automatically. On a CPU the
automatic value is `_HOST_KV_TOKENS`."""
_KV_SHARE: Final = 0.5
"""Maximum share of a GPU's free memory that the KV pool of a small model takes by default."""


def build_service(
    config: DrafterConfig,
    access: VerifierAccess,
    busy_cores: BusyCores | None = None,
    hooks: DrafterHooks | None = None,
) -> DrafterService:
    """Load all models that `config` names and return the service.

    `access`: the means to connect to verifiers. `busy_cores`: CPU cores that poll while there are
    sessions. `hooks`: the hook points that `config.hooks` has filled, or None for no hooks.

    Raises InvalidRequestError, NotFoundError or FailedPreconditionError if the configured parts do
    not fit together.
    """
    times = StartTimes()
    if config.exchanges_on_device:
        # CUDA reads this when it starts. Each replica waits on a stream of its own, and streams
        # that share a hardware connection wait for each other. The default is 8 connections.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    check_device(config.device)
    set_compute_threads(config.threads, config.device)
    set_current_device(config.device)
    config = resolve_model_paths(config)
    identity = load_identity(config)
    hooks = hooks or DrafterHooks()
    loaded = [_load_source(method, config, identity, times) for method in config.methods]
    proposers = [hooks.wrap_proposer(proposer) for proposer in loaded]
    grammars = GrammarCache.from_tokenizer_file(
        tokenizer_file(config.model),
        vocab_size=identity.vocab_size,
        limits=config.grammar_compile,
        masks=config.grammar_masks,
    )
    service = DrafterService(
        config,
        proposers,
        access.dialer,
        identity=identity,
        busy_cores=busy_cores,
        join=access.join,
        grammars=grammars,
        handicap=hooks.handicap,
        replicas=_make_replicas(loaded, config, identity, times),
    )
    times.log()
    return service


def _make_replicas(
    proposers: Sequence[Proposer],
    config: DrafterConfig,
    identity: TargetIdentity,
    times: StartTimes,
) -> ReplicaTable | None:
    """Return the replicas for exchange between devices, or None without an EAGLE-3 head or if that
    exchange is off."""
    heads = [p.head for p in proposers if isinstance(p, EagleProposer)]
    if torch.device(config.device).type == "cuda":
        from outrider_drafter.gpu.eagle import GpuEagleProposer

        heads += [p.head for p in proposers if isinstance(p, GpuEagleProposer)]
    heads = [head for head in heads if can_extract(head)]
    if not (heads and config.exchanges_on_device):
        return None
    # Imported here: it needs Triton, which a drafter on a CPU can do without.
    from outrider_drafter.gpu.replicas import Replicas

    replicas = Replicas(
        heads[0],
        vocab_size=identity.vocab_size,
        device=torch.device(config.device),
        cuda_graphs=config.cuda_graphs,
        max_sessions=config.max_sessions,
        max_kv_rows=config.exchange_kv_rows,
    )
    with times.measure(StartStage.KERNELS):
        replicas.warm_up()
    return replicas


def resolve_model_paths(config: DrafterConfig) -> DrafterConfig:
    """Return the configuration with names of pulled models replaced by their directories. Raises
    InvalidRequestError if `model` is missing."""
    if not config.model:
        raise InvalidRequestError("`model`, the target, must be given", reason="INVALID_CONFIG")
    draft_model = str(resolve_model(config.draft_model)) if config.draft_model else ""
    return replace(config, model=str(resolve_model(config.model)), draft_model=draft_model)


def load_identity(config: DrafterConfig) -> TargetIdentity:
    """Return the vocabulary size and the tokenizer hash of the target."""
    return TargetIdentity(
        vocab_size=load_model_config(config.model).vocab_size,
        tokenizer_hash=tokenizer_hash(config.model),
    )


def _load_source(
    method: DraftMethod, config: DrafterConfig, identity: TargetIdentity, times: StartTimes
) -> Proposer:
    if method is DraftMethod.NGRAM:
        ngram = config.ngram
        return NgramProposer(max_match=ngram.max_match, min_match=ngram.min_match)
    if method is DraftMethod.MODEL:
        return _load_small_model(config, identity, times)
    return _load_head(method, config, times)


def _load_head(method: DraftMethod, config: DrafterConfig, times: StartTimes) -> Proposer:
    dtype = getattr(torch, config.dtype)
    target = load_model_config(config.model)
    # Detect every mismatch that the files show before loading anything.
    read_head(Path(config.head), target, kind=method)
    with times.measure(StartStage.WEIGHTS):
        head = _load_weights(config, target, dtype)
    return build_head_proposer(head, config, dtype, times)


def build_head_proposer(
    head: DraftHead, config: DrafterConfig, dtype: torch.dtype, times: StartTimes | None = None
) -> Proposer:
    """Return a proposer for a loaded EAGLE head. It runs captured CUDA graphs if the device is a
    GPU and the graphs support the head. Otherwise the host launches each level of a draft. `times`:
    receives the durations of the start-up stages."""
    if torch.device(config.device).type != "cuda" or not can_extract(head):
        return EagleProposer(
            head,
            max_rows=config.head_kv_rows,
            max_context=config.head_max_context,
            dtype=dtype,
            device=config.device,
        )
    # Imported here: it needs Triton, which a drafter on a CPU can do without.
    from outrider_drafter.gpu.eagle import GpuEagleProposer
    from outrider_drafter.gpu.shapes import EXCHANGE_BUCKETS

    # Verifiers that exchange between devices request few drafts by messages. Fewer graphs let a
    # restarted drafter serve them sooner.
    exchanges = config.exchanges_on_device
    source = GpuEagleProposer(
        head,
        max_rows=config.head_kv_rows,
        max_context=config.head_max_context,
        max_sessions=config.max_sessions,
        dtype=dtype,
        device=config.device,
        cuda_graphs=config.cuda_graphs,
        bounded=config.cuda_graphs,
        buckets=EXCHANGE_BUCKETS if exchanges else None,
        look_ahead=not exchanges,
    )
    if config.cuda_graphs:
        _warm_up(source, times or StartTimes())
    return source


def _warm_up(source: GpuProposer, times: StartTimes) -> None:
    with times.measure(StartStage.KERNELS):
        source.compile_kernels()
    with times.measure(StartStage.CAPTURE):
        source.warm_up()


def _load_weights(config: DrafterConfig, target: ModelConfig, dtype: torch.dtype) -> DraftHead:
    shape = load_head_config(config.head, num_target_layers=target.num_layers)
    # Only a head over the whole vocabulary can be without an output projection of its own.
    borrows = shape.draft_vocab_size == shape.vocab_size
    return load_head(
        config.head,
        embedding=load_embedding(config.model, dtype=dtype),
        lm_head=load_lm_head(config.model, dtype=dtype) if borrows else None,
        num_target_layers=target.num_layers,
        dtype=dtype,
        device=config.device,
        # Replicas read the weights directly, so the layers must not repack them.
        make_linear=PlainLinear if config.exchanges_on_device else make_linear,
    )


def _load_small_model(
    config: DrafterConfig, identity: TargetIdentity, times: StartTimes
) -> Proposer:
    own = tokenizer_hash(Path(config.draft_model))
    if own and identity.tokenizer_hash and own != identity.tokenizer_hash:
        raise FailedPreconditionError(
            f"{config.draft_model} has another tokenizer than {config.model}",
            reason="TOKENIZER_MISMATCH",
        )
    with times.measure(StartStage.WEIGHTS):
        model = load_target(
            config.draft_model,
            dtype=getattr(torch, config.dtype),
            device=config.device,
            kv_tokens=partial(pool_tokens, config, identity.vocab_size),
        )
    return _model_source(model, config, identity.vocab_size, times)


def pool_tokens(config: DrafterConfig, vocab_size: int, model: ModelConfig) -> int:
    """Return the number of tokens in the small model's KV pool that the host proposer uses. On a
    GPU it serves only the sessions that captured graphs do not support."""
    asked = config.draft_model_kv_tokens or _HOST_KV_TOKENS
    beside = torch.device(config.device).type == "cuda" and _is_covered(model, vocab_size)
    return min(asked, _HOST_KV_TOKENS) if beside else asked


def device_tokens(free_bytes: int, bytes_per_token: int) -> int:
    """Return the number of tokens in the KV cache of a small model for sessions that are drafted by
    captured graphs. `free_bytes`: free memory of the GPU; `bytes_per_token`: KV size of a token."""
    return min(_MAX_KV_TOKENS, int(free_bytes * _KV_SHARE) // bytes_per_token)


def _is_covered(model: ModelConfig, vocab_size: int) -> bool:
    # Tree masks on the device do not support a sliding window, and the draft model must know every
    # token of the target.
    return model.vocab_size >= vocab_size and model.sliding_window is None


def _model_source(
    model: TargetModel, config: DrafterConfig, vocab_size: int, times: StartTimes
) -> Proposer:
    covered = _is_covered(model.config, vocab_size) and model.has_plain_weights
    if model.device.type != "cuda" or not covered:
        return SmallModelProposer(model, vocab_size=vocab_size)
    max_rows = config.draft_model_kv_tokens
    if not max_rows:
        free, _ = torch.cuda.mem_get_info(model.device)
        max_rows = device_tokens(free, kv_bytes_per_token(model.config, model.dtype))
    # Imported here: it needs Triton, which a drafter on a CPU can do without.
    from outrider_drafter.gpu.small_model import GpuSmallModelProposer

    source = GpuSmallModelProposer(
        model,
        vocab_size=vocab_size,
        max_rows=max_rows,
        max_sessions=config.max_sessions,
        cuda_graphs=config.cuda_graphs,
        bounded=config.cuda_graphs,
    )
    if config.cuda_graphs:
        _warm_up(source, times)
    return source
