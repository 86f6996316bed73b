"""Benchmark context: arguments, models and device that the GPU benchmarks of one run share."""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from outrider.client.local.model_files import DEFAULT_MODEL, ModelFiles, find_model
from outrider.engine.checkpoint import load_model_config
from outrider.engine.model_loader import load_target
from outrider.errors import InvalidRequestError
from outrider_bench.environment import describe
from outrider_bench.gpu.support.load_driver import chat_prompts
from outrider_bench.gpu.support.machine import BUSY_POLLING_CORES, DEVICE_COPY_BYTES_S
from outrider_bench.gpu.support.random_model import (
    SHAPES,
    head_shape,
    load_in_process_drafter,
    random_head,
    random_target,
    widened_target,
    write_drafter_files,
)
from outrider_bench.gpu.support.services import LoadedModels
from outrider_bench.gpu.support.widening import WideSpec, weight_bytes
from outrider_bench.prompts import load_prompts
from outrider_bench.report import format_table, print_progress

VLLM_EMITTED: Final = {1: 1.72, 3: 2.60, 5: 3.20, 7: 3.60}
"""Tokens per round that were simulated in the measurements of vLLM, by draft length."""
SPARE_SESSIONS: Final = 2
"""Number of sessions admitted beyond the batch size, because a session that has just ended may
still hold its blocks."""
SLACK_TOKENS: Final = 96
"""KV slots that a session may need beyond prompt and output, for draft nodes and for rounding up to
whole blocks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every device benchmark."""
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--device", default="cuda:0" if cuda else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    shapes = tuple(SHAPES)
    add("--shape", choices=shapes, default=shapes[0 if cuda else 1], help="random-weight model")
    add("--model", default=DEFAULT_MODEL, help="real model: name, directory or .gguf")
    add("--head", type=Path, help="its draft head; default: the one that ships for it")
    add("--wide", help="widened shape HIDDEN,INNER,LAYERS,HEADS,KV_HEADS; default: that of an 8B")
    add("--batches", type=_numbers, help="default: 1,8,32,64; quick: 1,8")
    add("--drafts", type=_numbers, default=(3, 5), help="draft lengths; default: 3,5")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, help="default: 256; quick: 64")
    add("--repeats", type=int, help="runs a figure is the median of; default: 40; quick: 10")
    add("--limit", type=int, help="number of prompts; default: all")
    add("--temperature", type=float, default=0.0)
    add("--placements", help="comma-separated; default: those that the benchmark compares")
    add("--drafter-device", default="", help="device of a separate drafter; default: the next one")
    add(
        "--busy-polling-cores",
        type=int,
        default=BUSY_POLLING_CORES
        if cuda and len(os.sched_getaffinity(0)) > 4 * BUSY_POLLING_CORES
        else 0,
        help="that separate verifier and drafter each keep from going idle",
    )
    add("--no-cuda-graphs", dest="graphs", action="store_false", help="launch kernel by kernel")
    add("--quick", action="store_true", help="fewer sizes and repeats")
    add("--out", type=Path, help="directory for NAME.json (and traces)")
    add("--json", action="store_true", help="last line of the output is one JSON object")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@dataclass(slots=True)
class Bench:
    """Flags of a run, with the models and the measurements that its benchmarks share."""

    args: argparse.Namespace
    memo: dict[Hashable, Any] = field(default_factory=dict)
    """Measurements that several benchmarks of one run share."""
    _loaded: dict[str, LoadedModels] = field(default_factory=dict)
    _files: tempfile.TemporaryDirectory[str] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        device = torch.device(self.args.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and KV."""
        dtype: torch.dtype = getattr(torch, self.args.dtype)
        return dtype

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of concurrent sessions to measure."""
        return self.args.batches or ((1, 8) if self.args.quick else (1, 8, 32, 64))

    @property
    def repeats(self) -> int:
        """Number of times that each micro-benchmark is repeated."""
        return self.args.repeats or (10 if self.args.quick else 40)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of each random prompt."""
        return int(self.args.prompt_tokens)

    @property
    def output_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return self.args.output_tokens or (64 if self.args.quick else 256)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool for the largest batch, in tokens."""
        return (max(self.batches) + SPARE_SESSIONS) * (self.max_tokens + SLACK_TOKENS) + 256

    @property
    def drafts(self) -> tuple[int, ...]:
        """Draft lengths to measure."""
        return tuple(self.args.drafts)

    def placements(self, *default: str) -> tuple[str, ...]:
        """Return the placements to compare: those of --placements, or `default` if the flag is not
        given."""
        return tuple(self.args.placements.split(",")) if self.args.placements else default

    def random(self) -> LoadedModels:
        """Return the target and head with random weights, which are loaded once."""
        return self._load("random", self._load_random)

    def real(self) -> LoadedModels:
        """Return the real model with its head, which are loaded once."""
        return self._load("real", self._load_real)

    def widened(self) -> LoadedModels:
        """Return the real model and head, widened to the cost of a large model. They are loaded
        once."""
        return self._load("widened", self._load_widened)

    def model_files(self) -> ModelFiles:
        """Return the files of the real model and its head. Raises InvalidRequestError without a
        head."""
        files = find_model(self.args.model, head=self.args.head)
        if files.head is None:
            raise InvalidRequestError(f"no head ships for {self.args.model}: give --head DIR")
        return files

    def prompts(self, count: int | None = None) -> list[list[int]]:
        """Return `count` chat prompts of the real model: the bundled ones (at most --limit),
        repeated as needed."""
        if "prompts" not in self.memo:
            chosen = load_prompts(limit=self.args.limit)
            found = chat_prompts(self.model_files().path, chosen)
            self.memo["prompts"] = [ids for ids in found if len(ids) <= self.prompt_tokens]
        found = self.memo["prompts"]
        count = len(found) if count is None else count
        return [found[i % len(found)] for i in range(count)]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer of the real model."""
        return load_model_config(self.model_files().path).eos_ids

    def floor_ms(self, models: LoadedModels) -> float:
        """Return the milliseconds in which the device reads the weights of one forward pass once,
        at the bandwidth of a device copy."""
        read = weight_bytes(models.target.config, models.target.dtype)
        return round(read / DEVICE_COPY_BYTES_S * 1000.0, 4)

    def result(
        self, name: str, models: LoadedModels | None, **content: object
    ) -> dict[str, object]:
        """Return `content` with the fields that every result has: the benchmark's name, the
        environment, the device and, if `models` is given, the model, its dtype, its weight bytes
        and the time to read them."""
        about: dict[str, object] = {"benchmark": f"gpu {name}", **describe()}
        about["device"] = _device_name(self.device)
        if models is not None:
            read = weight_bytes(models.target.config, models.target.dtype)
            about |= {"model": models.name, "dtype": str(models.target.dtype)}
            about |= {"weight_bytes": read, "floor_ms": self.floor_ms(models)}
        return {**about, **content}

    def close(self) -> None:
        """Free all models."""
        self._loaded.clear()
        if self._files is not None:
            self._files.cleanup()
            self._files = None
        free_memory()

    def _load(self, key: str, make: Any) -> LoadedModels:
        if key not in self._loaded:
            print_progress(f"loading the {key} model")
            with torch.inference_mode():
                models: LoadedModels = make()
                # Attention over zeros would be a benchmark of nothing.
                models.target.pool.storage.normal_()
            self._loaded[key] = models
        return self._loaded[key]

    def _load_random(self) -> LoadedModels:
        config = SHAPES[self.args.shape]
        target = random_target(
            config, dtype=self.dtype, device=self.device, kv_tokens=self.kv_tokens
        )
        vocab = 32000 if config.vocab_size > 32000 else config.vocab_size * 2 // 3
        head, projection = random_head(head_shape(config, vocab), target.embedding)
        name = f"{self.args.shape}, random weights"
        return LoadedModels(name=name, target=target, head=head, projection=projection)

    def _load_real(self) -> LoadedModels:
        files = self.model_files()
        assert files.head is not None
        target = load_target(
            files.path,
            dtype=self.dtype,
            device=self.device,
            kv_tokens=self.kv_tokens,
            packed=False,
        )
        head, projection = load_in_process_drafter(files.head, target)
        return LoadedModels(
            name=files.name,
            target=target,
            head=head,
            projection=projection,
            drafter_model=files.path,
            drafter_head=files.head,
        )

    def _load_widened(self) -> LoadedModels:
        files = self.model_files()
        assert files.head is not None
        spec = wide_spec(self.args.wide)
        target = widened_target(
            files.path, spec, dtype=self.dtype, device=self.device, kv_tokens=self.kv_tokens
        )
        if self._files is None:
            self._files = tempfile.TemporaryDirectory(prefix="outrider-widened-")
        model, head_dir = write_drafter_files(
            files.path, files.head, Path(self._files.name), spec, target
        )
        head, projection = load_in_process_drafter(head_dir, target)
        return LoadedModels(
            name=f"{files.name}, widened",
            target=target,
            head=head,
            projection=projection,
            drafter_model=model,
            drafter_head=head_dir,
        )


def wide_spec(text: str | None) -> WideSpec:
    """Return the widened shape that the flag's value `text` describes; the default shape for
    None."""
    if not text:
        return WideSpec()
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    return replace(WideSpec(), **dict(zip(names, _numbers(text), strict=True)))


def simulated(draft_length: int) -> str:
    """Return the SIMULATED mean number of tokens per round for this draft length, as text for
    `VerifierConfig.simulated_acceptance`.

    It is the value in `VLLM_EMITTED`, which was simulated in measurements of vLLM. For draft
    lengths that are not in this table it is 1 + 0.44 x length.
    """
    return str(VLLM_EMITTED.get(draft_length, round(1.0 + 0.44 * draft_length, 2)))


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table under a title and flush the output."""
    print(f"\n{title}\n{format_table(headers, rows)}", flush=True)


def free_memory() -> None:
    """Collect garbage and empty the CUDA cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return str(device)
