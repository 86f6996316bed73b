"""Loads the models and builds the service from a configuration. It imports torch."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from outrider.busy_polling import BusyCores
from outrider.checkpoints.head_tensors import read_head
from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoint import load_model_config
from outrider.engine.device.current_device import check_device, check_kernels, set_current_device
from outrider.engine.device.slots.logits_slots import logits_slot_bytes
from outrider.engine.heads import (
    DraftHead,
    FeatureProjection,
    load_feature_projection,
    load_head,
    load_head_config,
)
from outrider.engine.linear import make_linear
from outrider.engine.matmul_tuning import measured_choices, set_compute_threads, this_processor
from outrider.engine.model_loader import kv_bytes_per_token, load_lm_head, load_target
from outrider.engine.target import TargetModel
from outrider.engine.weight_copies import WeightCopies
from outrider.errors import InvalidRequestError
from outrider.grammar.grammar_cache import GrammarCache
from outrider.models import resolve_model
from outrider.start_times import StartStage, StartTimes
from outrider.text.tokenizer import tokenizer_file, tokenizer_hash
from outrider_verifier.config import DEFAULT_KV_TOKENS, VerifierConfig
from outrider_verifier.hooks import RoundThrottle, VerifierHooks
from outrider_verifier.kv.capacity import max_kv_tokens, reserved_bytes
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.server.service import VerifierService

logger = logging.getLogger(__name__)


def build_service(
    config: VerifierConfig,
    busy_cores: BusyCores | None = None,
    hooks: VerifierHooks | None = None,
) -> VerifierService:
    """Load all models that `config` names, and build the service. The service keeps `busy_cores`
    busy-polling while it has sessions. `hooks` are the hooks that `config.hooks` has installed;
    None if there are none. Raises InvalidRequestError, NotFoundError or FailedPreconditionError if
    models or settings do not fit together."""
    times = StartTimes()
    if not config.model:
        raise InvalidRequestError("`model` must be given", reason="INVALID_CONFIG")
    check_device(config.device)
    if uses_gpu_runner(config):
        check_kernels()
    set_compute_threads(config.threads, config.device)
    set_current_device(config.device)
    path = resolve_model(config.model)
    if config.feature_head:
        # Before the target is loaded, which takes long.
        _check_head(config, load_model_config(path))
    # On a GPU weights are copied while the kernels compile, for which they need not be there.
    copies = WeightCopies() if torch.device(config.device).type == "cuda" else None
    with times.measure(StartStage.WEIGHTS):
        target = _load_target(config, path, copies)
        projection: FeatureProjection | None = None
        if config.feature_head:
            projection = _load_projection(config, target.config.num_layers)
    throttle = None if hooks is None else hooks.round_throttle
    runner = build_model_runner(config, target, projection, throttle, copies=copies, times=times)
    kv_tokens = target.pool.total_blocks * target.pool.block_tokens
    logger.info("target loaded", extra={"model": str(path), "kv_tokens": kv_tokens})
    if products := measured_choices():
        threads = torch.get_num_threads()
        logger.info(
            "single-row products chosen",
            extra={"processor": str(this_processor()), "threads": threads, "products": products},
        )
    if config.has_in_process_drafter and torch.device(config.device).type == "cpu":
        logger.warning(
            "a head in the verifier is for GPUs: on a CPU its rounds run a device's programs over"
            " unpacked weights, several times as long as with a drafter of its own",
            extra={"placement": config.placement},
        )
    if config.simulated_acceptance:
        logger.warning(
            "SIMULATED ACCEPTANCE: drafts are accepted by chance, the text is not the model's",
            extra={"simulated_acceptance": config.simulated_acceptance},
        )
    service = VerifierService(
        config,
        target,
        projection,
        runner=runner,
        pool=target.pool,
        max_context_len=target.config.max_position_embeddings,
        model_name=config.model,
        tokenizer_hash=tokenizer_hash(path),
        grammars=GrammarCache.from_tokenizer_file(
            tokenizer_file(path),
            vocab_size=target.vocab_size,
            limits=config.grammar_compile,
            masks=config.grammar_masks,
        ),
        busy_cores=busy_cores,
    )
    times.log()
    return service


def build_model_runner(
    config: VerifierConfig,
    target: TargetModel,
    projection: FeatureProjection | None,
    throttle: RoundThrottle | None = None,
    *,
    copies: WeightCopies | None = None,
    times: StartTimes | None = None,
) -> ModelRunner:
    """Return the GPU runner if `uses_gpu_runner`, else the CPU runner. `throttle` makes the rounds
    last longer, for tests. `copies` are the running copies of the target's weights; they have ended
    when this returns, and the error of a failed copy is raised. The durations of the build stages
    are added to `times`."""
    times = times or StartTimes()
    if not uses_gpu_runner(config):
        return CpuModelRunner.build(config, target, projection, throttle=throttle)
    head = None
    if config.has_in_process_drafter:
        with times.measure(StartStage.WEIGHTS):
            head = _load_in_process_drafter(config, target)
    with times.measure(StartStage.IMPORTS):
        from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner

    runner = GpuModelRunner.build(
        config,
        target,
        projection,
        head,
        throttle=throttle,
        exchange_timeout_ms=config.exchange_timeout_ms if config.exchanges_on_device else 0.0,
    )
    with times.measure(StartStage.KERNELS):
        runner.compile_kernels(None if copies is None else copies.check)
    if copies is not None:
        with times.measure(StartStage.WEIGHTS_WAIT):
            copies.wait()
        times.add(StartStage.WEIGHTS, copies.seconds)
    with times.measure(StartStage.CAPTURE):
        runner.warm_up()
    return runner


def uses_gpu_runner(config: VerifierConfig) -> bool:
    """Return whether rounds need the GPU runner. They do on a GPU, and on a CPU if the
    configuration has features that only this runner implements."""
    on_device = torch.device(config.device).type != "cpu"
    return (
        on_device
        or config.has_in_process_drafter
        or config.exchanges_on_device
        or bool(config.simulated_acceptance)
    )


def _load_target(config: VerifierConfig, path: Path, copies: WeightCopies | None) -> TargetModel:
    """Load the target. Its KV pool has the configured size, or else the size that fits the device.
    `copies` are the running copies of the weights, as in `load_target`."""
    sized = config.kv_tokens == 0 and torch.device(config.device).type == "cuda"
    return load_target(
        path,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        kv_tokens=partial(_kv_tokens, config) if sized else config.kv_tokens or DEFAULT_KV_TOKENS,
        block_tokens=config.kv_block_tokens,
        # Kernels read weights as they are; a CPU's packed ones have a layout of their own.
        packed=not uses_gpu_runner(config),
        copies=copies,
        batch_invariant=config.batch_invariant and not config.is_on_cuda,
    )


def _kv_tokens(config: VerifierConfig, model: ModelConfig) -> int:
    """Return the number of tokens whose KV fits the device memory that the weights leave free."""
    # Not before it is a GPU that is served: a CPU needs no triton, which this asks for.
    from outrider.engine.device.inputs.token_masks import mask_bytes
    from outrider_verifier.model_runner.gpu_runner.shape_family import shape_family_for

    per_token = kv_bytes_per_token(model, getattr(torch, config.dtype))
    head_bytes = 0
    if config.has_in_process_drafter:
        # The head's own KV has the pool's slots: about one more layer.
        per_token += per_token // model.num_layers
        head_bytes = _size_of(Path(config.feature_head))
    free, total = torch.cuda.mem_get_info(config.device)
    longest = config.max_context_len or model.max_position_embeddings
    drafts_on_device = config.has_in_process_drafter or config.exchanges_on_device
    in_process_nodes = config.draft_length + 1 if drafts_on_device else 0
    family = shape_family_for(
        config, in_process_nodes=in_process_nodes, features=bool(config.feature_head)
    )
    return max_kv_tokens(
        free_bytes=free,
        total_bytes=total,
        fraction=config.memory_fraction,
        reserved=reserved_bytes(
            decode_tokens=config.decode_tokens_per_round,
            vocab_size=model.vocab_size,
            head_bytes=head_bytes,
            # The head's vocabulary is no larger.
            warp_bytes=(2 if config.has_in_process_drafter else 1)
            * logits_slot_bytes(config.max_sessions, model.vocab_size)
            + mask_bytes(
                config.max_sessions,
                config.max_tree_nodes + 1,
                max(in_process_nodes, 1 + config.in_process_tree_nodes),
                model.vocab_size,
            ),
            graph_layers=model.num_layers * sum(1 for _ in family.all_shapes()),
        ),
        bytes_per_token=per_token,
        max_tokens=config.max_sessions * (longest + config.max_tree_nodes),
    )


def _size_of(directory: Path) -> int:
    """Return the size of a checkpoint's files in bytes."""
    return sum(file.stat().st_size for file in directory.glob("*") if file.is_file())


def _check_head(config: VerifierConfig, target: ModelConfig) -> None:
    kind = "eagle3" if config.has_in_process_drafter else None
    try:
        read_head(Path(config.feature_head), target, kind=kind)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"feature_head {error.message}", reason=error.reason) from error


def _load_in_process_drafter(config: VerifierConfig, target: TargetModel) -> DraftHead:
    """Load the draft head at `config.feature_head` onto the target's device. It uses the target's
    embedding."""
    path, num_layers = config.feature_head, target.config.num_layers
    shape = load_head_config(path, num_target_layers=num_layers)
    # Only a head over the whole vocabulary can be without an output projection of its own.
    borrows = shape.draft_vocab_size == shape.vocab_size
    return load_head(
        path,
        embedding=target.embedding,
        lm_head=load_lm_head(resolve_model(config.model), dtype=target.dtype) if borrows else None,
        num_target_layers=num_layers,
        dtype=target.dtype,
        device=config.device,
        make_linear=partial(make_linear, packed=False),
    )


def _load_projection(config: VerifierConfig, num_layers: int) -> FeatureProjection:
    return load_feature_projection(
        config.feature_head,
        num_target_layers=num_layers,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        make_linear=make_linear,
    )
