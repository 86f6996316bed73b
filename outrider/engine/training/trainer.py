"""Trainer of a draft head: short learning-rate trials, then one long run."""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.engine.training.data import PackShape, TrainingBatch, TrainingSample, epoch_batches
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.target import TrainingTarget
from outrider.engine.training.unrolled_forward import (
    MAX_STEPS,
    DeepSteps,
    UnrolledForward,
    make_labels,
)

logger = logging.getLogger(__name__)


UNROLL_STEPS = (7, 13)
"""Number of draft steps in the first and in the second half of a run. Look-ahead needs twice the
depth of a draft plus one step, because it continues a draft that is not verified yet."""
WHOLE_STEPS = 5
DEEP_SHARE = 0.25
STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Hyperparameters of one optimisation run."""

    steps: int
    """Maximum number of updates. The run ends earlier if it reaches its time limit."""
    seconds: float | None = None
    """Time limit of the run; None for no limit."""
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    clip_norm: float = 0.5
    step_decay: float = STEP_DECAY
    """Factor between the loss weights of successive draft steps: step j has weight step_decay **
    j."""
    unroll_early: int = UNROLL_STEPS[0]
    """Number of draft steps in the first part of the run."""
    unroll_late: int = UNROLL_STEPS[1]
    """Number of draft steps in the second part of the run."""
    unroll_switch: float = 0.5
    """Share of the run after which the second part begins."""
    whole_steps: int = WHOLE_STEPS
    """Number of draft steps that run on the whole batch."""
    deep_share: float = DEEP_SHARE
    """Share of the batch's rows on which all later draft steps run."""
    seed: int = 0
    log_every: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.unroll_early <= self.unroll_late <= MAX_STEPS:
            raise ValueError(
                f"the unroll must rise within 1..{MAX_STEPS}, "
                f"not from {self.unroll_early} to {self.unroll_late}"
            )
        if not 0.0 < self.step_decay <= 1.0:
            raise ValueError(f"the decay of steps must be within (0, 1], not {self.step_decay}")
        DeepSteps(first=self.whole_steps, share=self.deep_share)

    @property
    def deep(self) -> DeepSteps:
        """Which draft steps run on only a part of the batch, and on which share of its rows."""
        return DeepSteps(first=self.whole_steps, share=self.deep_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """Metrics of one logged update. `loss` is that of the first draft step. `accuracy` has, for
    each draft step, the share of draft tokens that equal the target's argmax."""

    step: int
    seconds: float
    learning_rate: float
    loss: float
    accuracy: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of one optimisation run."""

    steps: int
    seconds: float
    tokens: int
    """Number of token positions in the batches of the run, including prompts and without
    padding."""
    epochs: float
    final_loss: float
    """Mean loss of the first draft step over the last fifth of the logged updates."""
    log: list[LogEntry]


Checkpoint = Callable[[int], None]


class Trainer:
    """Trains a draft head on answers of a frozen target model."""

    def __init__(
        self,
        target: TrainingTarget,
        samples: Sequence[TrainingSample],
        shape: PackShape,
        *,
        compile: bool = False,
    ) -> None:
        self._target = target.compiled() if compile else target
        self._samples = samples
        self._shape = shape
        self._compile = compile

    def pick_learning_rate(
        self, head: TrainableHead, rates: Sequence[float], steps: int, config: TrainConfig
    ) -> tuple[float, dict[str, float]]:
        """Train a copy of `head` for `steps` updates at each learning rate. Return the rate with
        the lowest final loss, and a dict from each rate, as text, to its final loss."""
        losses: dict[str, float] = {}
        for rate in rates:
            trial = copy.deepcopy(head)
            warmup = min(config.warmup_steps, steps // 4)
            setting = replace(
                config,
                learning_rate=rate,
                steps=steps,
                seconds=None,
                warmup_steps=warmup,
                log_every=min(10, config.log_every),
            )
            losses[f"{rate:g}"] = self.run(trial, setting).final_loss
            logger.info("learning rate %g: loss %.4f", rate, losses[f"{rate:g}"])
        best = min(losses, key=losses.__getitem__)
        return float(best), losses

    def run(
        self,
        head: TrainableHead,
        config: TrainConfig,
        checkpoint: Checkpoint | None = None,
        checkpoint_s: float = 120.0,
    ) -> RunResult:
        """Train `head` in place until the number of updates or the time limit is reached.
        `checkpoint` is called with the number of the update about every `checkpoint_s` seconds."""
        device = self._target.device
        forward = UnrolledForward(
            head,
            self._target.embedding,
            dtype=self._target.embedding.dtype,
            compile=self._compile,
            max_steps=config.unroll_late,
            deep=config.deep,
        )
        optimiser = _optimiser(head, device)
        log: list[LogEntry] = []
        started = saved = time.monotonic()
        tokens = step = 0
        for step, batch in enumerate(self._stream(config.seed)):
            elapsed = time.monotonic() - started
            progress = _progress(step, elapsed, config)
            if progress >= 1.0:
                break
            unroll = config.unroll_late if progress >= config.unroll_switch else config.unroll_early
            rate = _learning_rate(step, progress, config)
            for group in optimiser.param_groups:
                group["lr"] = rate
            entry = self._update(forward, optimiser, batch.to(device), unroll, config, step)
            tokens += int((batch.documents_BS >= 0).sum())
            if entry is not None:
                log.append(replace(entry, seconds=time.monotonic() - started, learning_rate=rate))
                _report(log[-1], tokens)
            if checkpoint is not None and time.monotonic() - saved > checkpoint_s:
                saved = time.monotonic()
                checkpoint(step)
        tail = log[-max(1, len(log) // 5) :]
        return RunResult(
            steps=step,
            seconds=time.monotonic() - started,
            tokens=tokens,
            epochs=tokens / max(1, sum(len(s) for s in self._samples)),
            final_loss=sum(e.loss for e in tail) / max(1, len(tail)),
            log=log,
        )

    def _update(
        self,
        forward: UnrolledForward,
        optimiser: torch.optim.Optimizer,
        batch: TrainingBatch,
        unroll: int,
        config: TrainConfig,
        step: int,
    ) -> LogEntry | None:
        """Run one optimiser update. Return a log entry if this update is logged, else None."""
        with torch.no_grad():
            final, taps = self._target.forward(
                batch.ids_BS,
                batch.positions_BS,
                batch.attention_mask(),
                forward.head.config.tap_layers,
            )
            labels = make_labels(forward.head, self._target, final, batch)
        result = forward(batch, taps, labels, unroll)
        weights = [config.step_decay**j for j in range(unroll)]
        loss = torch.stack([w * v for w, v in zip(weights, result.losses, strict=True)]).sum()
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(forward.head.parameters(), config.clip_norm)
        optimiser.step()
        if step % config.log_every and step:
            return None
        accuracy = [
            float((c & v).sum() / v.sum().clamp_min(1))
            for c, v in zip(result.correct, result.valid, strict=True)
        ]
        return LogEntry(
            step=step,
            seconds=0.0,
            learning_rate=0.0,
            loss=float(result.losses[0].detach()),
            accuracy=accuracy,
        )

    def _stream(self, seed: int) -> Iterator[TrainingBatch]:
        """Yield batches without end. A background thread prepares them in advance."""
        ready: queue.Queue[TrainingBatch] = queue.Queue(maxsize=8)
        stop = threading.Event()

        def produce() -> None:
            epoch = 0
            while not stop.is_set():
                for batch in epoch_batches(self._samples, self._shape, seed + epoch):
                    while not stop.is_set():
                        try:
                            ready.put(batch, timeout=0.2)
                            break
                        except queue.Full:
                            continue
                    if stop.is_set():
                        return
                epoch += 1

        thread = threading.Thread(target=produce, name="batches", daemon=True)
        thread.start()
        try:
            while True:
                yield ready.get()
        finally:
            stop.set()
            thread.join()


def _optimiser(head: TrainableHead, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW over the fp32 master weights. Its learning rate is set before every update."""
    return torch.optim.AdamW(
        head.parameters(),
        lr=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=device.type == "cuda",
    )


def _progress(step: int, elapsed: float, config: TrainConfig) -> float:
    """Return the completed share of the run: of its updates or of its time, whichever is larger."""
    by_steps = step / max(1, config.steps)
    return by_steps if config.seconds is None else max(by_steps, elapsed / config.seconds)


def _learning_rate(step: int, progress: float, config: TrainConfig) -> float:
    """Return the learning rate of an update. The schedule is a cosine with linear warm-up. The
    cosine factor does not fall below 0.01."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * warm * max(0.01, cosine)


def _report(entry: LogEntry, tokens: int) -> None:
    logger.info(
        "step %d: %.0f s, %.1f M tokens, lr %.2g, loss %.4f, accuracy %s",
        entry.step,
        entry.seconds,
        tokens / 1e6,
        entry.learning_rate,
        entry.loss,
        " ".join(f"{a:.3f}" for a in entry.accuracy),
    )
