"""Generation of training answers by the target: batch decoding with continuous slot refill.

A slot holds one answer that is being decoded. When it is complete, the slot is refilled with the
next request. Shapes: B slots, L cached length, V vocabulary size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.training.data import TokenIdArray
from outrider.engine.training.target import TrainingTarget, masked_attention

logger = logging.getLogger(__name__)

_STEPS_PER_POLL = 16
_LENGTH_STEP = 64


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt to be answered at one temperature; 0 means greedy decoding."""

    prompt: TokenIdArray
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Parameters of a generation run."""

    max_new_tokens: int = 256
    slots: int = 1024
    seed: int = 0
    deadline_s: float | None = None
    """Time after which no further request is started, in seconds. Requests that have not been
    started get no answer. None for no limit."""
    use_graphs: bool = True
    """Whether to use CUDA graphs (on CUDA devices only)."""


@dataclass(slots=True)
class _Slots:
    """Device state of the slots. `out` has one extra column, into which idle slots write."""

    token: Tensor
    position: Tensor
    count: Tensor
    done: Tensor
    temperature: Tensor
    out: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class BatchDecoder:
    """Decodes many requests with a fixed number of slots, one request per slot at a time."""

    def __init__(
        self, target: TrainingTarget, stop_ids: Sequence[int], max_len: int, config: GenerateConfig
    ) -> None:
        self._target = target
        self._graphed = config.use_graphs and target.device.type == "cuda"
        self._step_target = target.compiled() if self._graphed else target
        self._config = config
        self._max_len = -(-max_len // _LENGTH_STEP) * _LENGTH_STEP
        self._stop = torch.tensor(list(stop_ids), device=target.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._slots = self._allocate()
        self._rows = torch.arange(config.slots, device=target.device)

    def run(self, requests: Sequence[AnswerRequest]) -> list[TokenIdArray | None]:
        """Return the answer of each request, including its stop token; None for requests that were
        not started before the deadline."""
        answers: list[TokenIdArray | None] = [None] * len(requests)
        queue = _order(requests, self._config.slots, self._config.seed)[::-1]
        owner = np.full(self._config.slots, -1, dtype=np.int64)
        lengths = np.zeros(self._config.slots, dtype=np.int64)
        started, reported, total = time.monotonic(), 0.0, 0
        while True:
            elapsed = time.monotonic() - started
            total += self._harvest(owner, answers)
            late = self._config.deadline_s is not None and elapsed > self._config.deadline_s
            self._refill(requests, queue if not late else [], owner, lengths)
            if (owner < 0).all():
                break
            self._advance(int(lengths[owner >= 0].max()) + _STEPS_PER_POLL + 1)
            lengths += _STEPS_PER_POLL
            if elapsed - reported > 10:
                reported = elapsed
                logger.info("generated %d tokens, %.0f/s", total, total / elapsed)
        return answers

    def _allocate(self) -> _Slots:
        c, device = self._target.config, self._target.device
        size = self._config.slots

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        slots = _Slots(
            token=zeros(torch.int64),
            position=zeros(torch.int64),
            count=zeros(torch.int64),
            done=torch.ones(size, dtype=torch.bool, device=device),
            temperature=zeros(torch.float32),
            out=torch.zeros(
                size, self._config.max_new_tokens + 1, dtype=torch.int64, device=device
            ),
        )
        shape = (size, c.num_kv_heads, self._max_len, c.head_dim)
        dtype = self._target.embedding.dtype
        for _ in range(c.num_layers):
            slots.keys.append(torch.zeros(shape, dtype=dtype, device=device))
            slots.values.append(torch.zeros(shape, dtype=dtype, device=device))
        return slots

    def _harvest(self, owner: np.ndarray, answers: list[TokenIdArray | None]) -> int:
        """Store the answers of finished slots and return the number of tokens stored."""
        finished = np.flatnonzero(self._slots.done.cpu().numpy() & (owner >= 0))
        if not len(finished):
            return 0
        index = torch.from_numpy(finished).to(self._target.device)
        out = self._slots.out[index].cpu().numpy().astype(np.int32)
        counts = self._slots.count[index].cpu().numpy()
        for row, slot in enumerate(finished.tolist()):
            answers[int(owner[slot])] = out[row, : counts[row]].copy()
        owner[finished] = -1
        return int(counts.sum())

    def _refill(
        self,
        requests: Sequence[AnswerRequest],
        queue: list[int],
        owner: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Prefill the next requests into the free slots and start them."""
        free = np.flatnonzero(owner < 0)[: len(queue)]
        if not len(free):
            return
        chosen = [queue.pop() for _ in range(len(free))]
        prompts = [requests[i].prompt for i in chosen]
        sizes = np.asarray([len(p) for p in prompts], dtype=np.int64)
        padded = np.zeros((len(prompts), int(sizes.max())), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        device = self._target.device
        index = torch.from_numpy(free).to(device)
        self._prefill(index, torch.from_numpy(padded).to(device))
        self._slots.token[index] = torch.tensor([int(p[-1]) for p in prompts], device=device)
        self._slots.position[index] = torch.from_numpy(sizes - 1).to(device)
        self._slots.count[index] = 0
        self._slots.temperature[index] = torch.tensor(
            [requests[i].temperature for i in chosen], device=device
        )
        self._slots.done[index] = False
        owner[free] = chosen
        lengths[free] = sizes

    def _prefill(self, index: Tensor, ids: Tensor) -> None:
        """Write the prompts' KV. The first decode step processes the last prompt token again."""
        size = ids.shape[1]
        positions = torch.arange(size, device=ids.device).expand_as(ids)
        mask = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()[None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._slots.keys[layer][index, :, :size] = k.transpose(1, 2)
            self._slots.values[layer][index, :, :size] = v.transpose(1, 2)
            return masked_attention(q, k, v, mask)

        self._target.run_layers(F.embedding(ids, self._target.embedding), positions, attend)

    def _advance(self, needed: int) -> None:
        """Run _STEPS_PER_POLL decode steps. `needed`: cache length that they need; they attend to a
        prefix of the cache of about this length."""
        length = min(self._max_len, -(-needed // _LENGTH_STEP) * _LENGTH_STEP)
        if not self._graphed:
            for _ in range(_STEPS_PER_POLL):
                self._step(length)
            return
        remaining = _STEPS_PER_POLL
        if length not in self._graphs:
            self._step(length)
            remaining -= 1
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(length)
            self._pool = self._pool or graph.pool()
            self._graphs[length] = graph
        for _ in range(remaining):
            self._graphs[length].replay()

    def _step(self, length: int) -> None:
        """Decode one token for every active slot, and update the state of all slots in place."""
        s, c = self._slots, self._target.config
        position = s.position.clamp(max=length - 1)
        columns = torch.arange(length, device=position.device)
        mask = (columns <= position[:, None])[:, None, None, :]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            s.keys[layer][self._rows, :, position] = k[:, 0]
            s.values[layer][self._rows, :, position] = v[:, 0]
            grouped = q.view(len(position), c.num_kv_heads, -1, c.head_dim)
            out = F.scaled_dot_product_attention(
                grouped,
                s.keys[layer][:, :, :length],
                s.values[layer][:, :, :length],
                attn_mask=mask,
            )
            return out.reshape(q.shape)

        x = F.embedding(s.token[:, None], self._target.embedding)
        x, _ = self._step_target.run_layers(x, position[:, None], attend)
        logits = self._target.logits(self._target.final_norm(x[:, 0])).float()
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-20).log_()
        token = (logits - noise * s.temperature[:, None]).argmax(-1)
        limit = self._config.max_new_tokens
        column = torch.where(s.done, limit, s.count)
        s.out.scatter_(1, column[:, None], token[:, None])
        active = ~s.done
        s.count += active
        s.position += active
        s.token.copy_(token)
        stopped = (token[:, None] == self._stop).any(-1)
        s.done |= stopped | (s.count >= limit)


def _order(requests: Sequence[AnswerRequest], slots: int, seed: int) -> list[int]:
    """Return request indices, shuffled and then sorted by prompt length within large blocks.

    Consecutive requests thus need similar cache lengths, and the requests that are not started
    before the deadline are nearly a random subset.
    """
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    block = max(1, 16 * slots)
    result: list[int] = []
    for start in range(0, len(order), block):
        part = order[start : start + block]
        result += sorted(part, key=lambda i: len(requests[i].prompt))
    return result


@torch.inference_mode()
def generate_answers(
    target: TrainingTarget,
    requests: Sequence[AnswerRequest],
    stop_ids: Sequence[int],
    config: GenerateConfig,
) -> list[TokenIdArray | None]:
    """Return the target's answer to each request, including its stop token; None for requests that
    were not started before the deadline."""
    if not requests:
        return []
    torch.manual_seed(config.seed)
    longest = max(len(r.prompt) for r in requests) + config.max_new_tokens
    return BatchDecoder(target, stop_ids, longest + _STEPS_PER_POLL, config).run(requests)
