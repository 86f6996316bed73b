"""Sessions to draft for, over one paged storage on a device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from outrider_drafter.proposers.eagle_forest import CatchUpRows, EagleForest, EagleKV, EagleKVBudget
from outrider_drafter.proposers.forest import ForestTrees
from outrider_drafter.proposers.interface import ProposedDraft
from outrider_drafter.proposers.tree_growth import GrowthJob, TreeGrowth, grow_trees
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.heads import DraftHead, load_head
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.kernels.drafts.tree_rank import TreeDraft
from outrider.engine.kernels.session_tensors import RULE_NUMBERS, SamplingState, stream_key_row
from outrider.engine.linear import PlainLinear
from outrider.spec.sampling import Rule, SamplingParams

HIDDEN, VOCAB, BLOCK, BLOCKS = 64, 384, 4, 16
MIXED = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=2**63 + 11),
    SamplingParams(temperature=0.7, rule=Rule.TARGET_ONLY, seed=3),
)
DETERMINISTIC = (
    SamplingParams(),
    SamplingParams(temperature=0.7, rule=Rule.TARGET_ONLY, seed=3),
    SamplingParams(temperature=1.6, rule=Rule.TARGET_ONLY, seed=4),
)


ROUNDS = [([0, 0, 0], [5, 9, 1]), ([5, 9, 1], [1, 4, 3]), ([6, 13, 4], [5, 2, 1])]
"""Starts and counts of three rounds: first a prompt, then accepted prefixes of many lengths."""


def total(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [s + c for s, c in zip(starts, counts, strict=True)]


def plain_head(
    directory: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DraftHead:
    """The head of a directory, over weights that are not packed."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return load_head(
        directory, embedding=embedding, make_linear=PlainLinear, dtype=dtype, device=device
    )


def tree_of(draft: TreeDraft, row: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and log-probs of the nodes that are there."""
    parents = draft.parents[row].tolist()
    count = sum(p != PADDING_NODE for p in parents)
    assert parents[count:] == [PADDING_NODE] * (len(parents) - count)
    return (
        draft.tokens[row, :count].tolist(),
        parents[:count],
        draft.logprobs[row, :count].tolist(),
    )


@dataclass
class Sessions:
    """Sessions of random tokens and features, over one paged storage and on the host."""

    head: DraftHead
    sampling: Sequence[SamplingParams]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    scratch: int = 0
    """Blocks of no session, after the padding block."""
    forward: HeadForward = field(init=False)
    program: LookAheadProgram = field(init=False)
    state: SamplingState = field(init=False)
    storage: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    tokens: NDArray[np.int64] = field(init=False)
    features: Tensor = field(init=False)

    def __post_init__(self) -> None:
        count, config = len(self.sampling), self.head.config
        rng, generator = np.random.default_rng(7), torch.Generator().manual_seed(9)
        blocks = torch.randperm(count * BLOCKS, generator=generator).view(count, BLOCKS)
        padding = torch.full((1, BLOCKS), count * BLOCKS)
        self.tables = torch.cat((blocks, padding)).int().to(self.device)
        slots = (count * BLOCKS + 1 + self.scratch) * BLOCK
        shape = (2, 1, config.num_kv_heads, slots, config.head_dim)
        self.storage = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.forward = HeadForward(
            HeadWeights.from_head(self.head),
            storage=self.storage,
            block_tokens=BLOCK,
            max_len=BLOCKS * BLOCK,
        )
        self.program = LookAheadProgram(self.forward)
        keys = [stream_key_row(p) for p in (*self.sampling, SamplingParams())]
        self.state = SamplingState(
            stream_keys=torch.from_numpy(np.stack(keys)).to(self.device),
            temperatures=torch.tensor(
                [*(p.temperature for p in self.sampling), 0.0], device=self.device
            ),
            rules=torch.tensor(
                [*(RULE_NUMBERS[p.effective_rule] for p in self.sampling), 0],
                dtype=torch.int32,
                device=self.device,
            ),
        )
        self.tokens = rng.integers(0, VOCAB, (count, 40))
        self.features = torch.randn(count, 40, HIDDEN, generator=generator)

    def rows(self, starts: Sequence[int], counts: Sequence[int], width: int) -> NewRows:
        """New rows `starts` .. `starts + counts` of each session, and one padding row."""
        batch = len(starts)
        tokens = torch.full((batch + 1, width), -1, dtype=torch.int32)
        features = torch.full((batch + 1, width, HIDDEN), 1e3)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[b, :count] = torch.from_numpy(self.tokens[b, start + 1 : start + 1 + count])
            features[b, :count] = self.features[b, start : start + count]
        here = [*counts, 0], [*starts, 0]
        return NewRows(
            slots=torch.arange(batch + 1, dtype=torch.int32, device=self.device),
            tables=self.tables,
            tokens=tokens.to(self.device),
            features=features.to(self.device, self.dtype),
            counts=torch.tensor(here[0], dtype=torch.int32, device=self.device),
            starts=torch.tensor(here[1], dtype=torch.int32, device=self.device),
        )

    def kept(self, session: int, rows: int) -> Tensor:
        """KV [2, G, rows, d] of a session."""
        index = torch.arange(rows, device=self.device)
        pool = self.tables[session, index // BLOCK].long() * BLOCK + index % BLOCK
        return self.storage[:, 0, :, pool]

    def on_host(
        self, lengths: Sequence[int], growths: Sequence[TreeGrowth]
    ) -> dict[int, ProposedDraft]:
        """The host's drafts, from scratch: session b has `lengths[b]` real rows."""
        config, real = self.head.config, []
        for b, length in enumerate(lengths):
            kv = EagleKV(
                EagleKVBudget(1000),
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=torch.float32,
                device="cpu",
            )
            kv.reserve(200, ceiling=200)
            ids = torch.from_numpy(self.tokens[b, 1 : length + 1])
            real.append(CatchUpRows(kv=kv, token_ids=ids, features=self.features[b, :length]))
        jobs = [
            GrowthJob(slot=b, growth=growth, sampling=p, prefix_len=length + 1, history=None)
            for b, (growth, p, length) in enumerate(
                zip(growths, self.sampling, lengths, strict=True)
            )
        ]
        forest = EagleForest(self.head, real, max_context=200)
        return dict(grow_trees(ForestTrees.below_roots(forest), jobs))
