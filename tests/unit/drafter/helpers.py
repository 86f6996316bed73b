"""Scripted prefixes for the drafter's tests: verdicts as a verifier would send them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.proposers.interface import Proposer
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import VerdictLimits

from outrider.engine.heads import DraftHead, load_head
from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import (
    Proposal,
    Proposals,
    SessionStart,
    TensorDtype,
    Verdict,
    Verdicts,
    WireTensor,
)
from tests.factories import make_eagle3_head

HIDDEN = 64
VOCAB = 384
CHAIN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, top_k=1)
TREE = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=12, top_k=4, depth=4)


def embedding() -> torch.Tensor:
    """The target's embedding that all head tests share, float64."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)


def head_source(
    directory: Path, *, max_rows: int = 4096, dtype: torch.dtype = torch.float64
) -> EagleProposer:
    """A random head of `tests.factories`, in float64 so that it can be compared."""
    return EagleProposer(_head(directory, dtype), max_rows=max_rows, dtype=dtype)


@lru_cache(maxsize=4)
def _head(directory: Path, dtype: torch.dtype) -> DraftHead:
    if not (directory / "config.json").exists():
        make_eagle3_head(directory)
    return load_head(directory, embedding=embedding(), dtype=dtype)


_NAMES: dict[int, str] = {}


def handle_of(name: str) -> int:
    """The handle of a session with this name."""
    handle = crc32(name.encode()) % 65536
    assert _NAMES.setdefault(handle, name) == name
    return handle


def name_of(proposal: Proposal) -> str:
    """Whose draft it is."""
    return _NAMES[proposal.handle]


class Script:
    """One session's committed prefix, told verdict by verdict."""

    def __init__(self, name: str = "s", *, seed: int = 0, length: int = 64, epoch: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.session_id = SessionId(name)
        self.handle = handle_of(name)
        self.epoch = epoch
        self.tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        self.features = rng.standard_normal((length, HIDDEN)).astype(np.float32)
        self.told = 0
        self.features_told = 0

    def start(
        self,
        *,
        plan: SpeculationPlan = CHAIN,
        sampling: SamplingParams | None = None,
        prompt_len: int = 8,
        max_len: int = 512,
    ) -> SessionStart:
        """The announcement."""
        return SessionStart(
            handle=self.handle,
            session_id=self.session_id,
            epoch=self.epoch,
            plan=plan,
            sampling=sampling or SamplingParams(),
            max_len=max_len,
            prompt_len=prompt_len,
        )

    def digest(self, end: int) -> int:
        """Digest of the first `end` tokens."""
        return extend_digest(EMPTY_DIGEST, self.tokens[:end].tolist())

    def verdict(
        self, end: int, *, draft_wanted: bool = True, with_features: bool = True
    ) -> Verdicts:
        """The message of `entry` alone."""
        return Verdicts.of_verdicts(
            [self.entry(end, draft_wanted=draft_wanted, with_features=with_features)]
        )

    def entry(self, end: int, *, draft_wanted: bool = True, with_features: bool = True) -> Verdict:
        """What became committed up to `end` tokens since the last verdict."""
        start, self.told = self.told, end
        feature_start = self.features_told
        feature_end = end - 1 if draft_wanted else end
        features = None
        if with_features:
            self.features_told = feature_end
            features = WireTensor(
                dtype=TensorDtype.FLOAT32, data=self.features[feature_start:feature_end].copy()
            )
        return Verdict(
            handle=self.handle,
            start=start,
            tokens=self.tokens[start:end].copy(),
            prefix_digest=self.digest(end),
            feature_start=feature_start,
            features=features,
            draft_wanted=draft_wanted,
        )


def repeating(name: str = "s") -> Script:
    """A session of which n-grams draft well."""
    script = Script(name)
    script.tokens[:] = [i % 5 for i in range(len(script.tokens))]
    return script


def make_engine(
    proposers: Sequence[Proposer],
    *,
    max_sessions: int = 64,
    max_context: int = 4096,
    in_time: bool = False,
) -> DraftEngine:
    """An engine over some proposers. in_time: whether this machine's speed decides how far it looks
    ahead."""
    sizes = [p.feature_size for p in proposers if p.feature_size]
    limits = VerdictLimits(
        vocab_size=VOCAB, feature_size=sizes[0] if sizes else 0, max_context=max_context
    )
    return DraftEngine(
        proposers,
        limits=limits,
        max_sessions=max_sessions,
        metrics=DrafterMetrics(),
        in_time=in_time,
    )


def drain(engine: DraftEngine) -> list[Proposal]:
    """The drafts that the engine has to propose, with all catch-up done."""
    return [proposal for proposal in answers(engine) if len(proposal.tree)]


def answers(engine: DraftEngine) -> list[Proposal]:
    """Every proposal, also the empty ones that say that no draft comes."""
    proposals = [
        proposal
        for together in engine.draft_wanted()
        for _, message in together
        if isinstance(message, Proposals)
        for proposal in message.iter_proposals()
    ]
    while engine.is_behind:
        engine.catch_up_session()
    return proposals


def counted(engine: DraftEngine, name: str, **labels: str) -> float:
    """Value of a metric of this engine."""
    engine.update_metrics()
    value = engine.metrics.registry.get_sample_value(name, labels)
    return 0.0 if value is None else value


def double(array: NDArray[np.float32]) -> NDArray[np.float64]:
    """As the oracle wants it."""
    return array.astype(np.float64)
