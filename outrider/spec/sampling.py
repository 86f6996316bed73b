"""Sampling parameters and acceptance rules of a session (torch-free)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from outrider.errors import InvalidRequestError
from outrider.spec.noise import NoiseStream, stream_key


class Rule(StrEnum):
    """Acceptance rule of a session."""

    GREEDY = "greedy"
    """Emit the argmax of the logits. This rule always applies at temperature 0."""
    COUPLED = "coupled"
    """Emit the argmax of logits / T + g, where the Gumbel noise g depends on seed, position and
    token. This is the default at temperature T > 0."""
    REJECTION = "rejection"
    """Rejection sampling with the draft distribution that the drafter sent."""
    TARGET_ONLY = "target-only"
    """Rejection sampling with a one-hot draft distribution. This rule also replaces REJECTION if
    the draft distribution is missing."""


MAX_TEMPERATURE = 100.0
MAX_BANNED_IDS = 1024
MAX_BIASED_IDS = 1024
MAX_BIAS = 100.0
"""Largest absolute value of a logit bias."""
UINT64_MAX = 2**64 - 1
MIN_SEED = -(2**63)
"""Smallest seed that clients may send. A negative seed s stands for s + 2^64."""
LOWEST_LOGPROB = -9999.0
"""Value that is returned for all smaller log-probabilities, including -inf, which JSON cannot
represent."""


def _require(ok: bool, message: str, param: str = "") -> None:
    if not ok:
        raise InvalidRequestError(message, reason="INVALID_SAMPLING", param=param)


def _check_bias(entries: tuple[tuple[int, float], ...]) -> None:
    ids = [entry[0] for entry in entries]
    _require(
        len(ids) <= MAX_BIASED_IDS and all(i >= 0 for i in ids),
        f"logit_bias must hold at most {MAX_BIASED_IDS} ids >= 0",
    )
    _require(len(set(ids)) == len(ids), "logit_bias must not name an id twice")
    _require(
        all(abs(amount) <= MAX_BIAS for _, amount in entries),  # false for NaN
        f"amounts of logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters: the only settings that the logits processors of verifier and
    drafter use."""

    temperature: float = 0.0
    """Divisor of the logits, in [0, 100]; 0 decodes greedily."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of ids whose probability reaches top_p. In (0, 1]."""
    min_p: float = 0.0
    """Drop ids whose probability is below min_p times that of the most probable id. In [0, 1]."""
    repetition_penalty: float = 1.0
    """Repetition penalty, as defined for the model CTRL, over prompt and output ids; > 0. The value
    1 disables it."""
    presence_penalty: float = 0.0
    """Amount subtracted once from the logit of every id in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Amount subtracted from an id's logit for each occurrence in the output, in [-2, 2]."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that are never emitted."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the amount in [-100, 100] that is added to its logit; ids are
    distinct."""
    seed: int = 0
    """64-bit seed of the session's noise; 0 in a drafter's copy, which does not contain the
    seed."""
    rule: Rule = Rule.COUPLED
    """Acceptance rule at temperature > 0."""
    draft_key: int | None = None
    """Key of the noise stream from which a drafter draws, in a drafter's copy (`for_drafter`). It
    is 0 if drafts need no noise. None in all other objects, which contain the seed."""

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE,
            f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}",
        )
        _require(self.top_k >= 0, f"top_k must be >= 0 (0 keeps all), got {self.top_k}")
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0,
            f"repetition_penalty must be positive, got {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}")
        _require(
            len(self.banned_ids) <= MAX_BANNED_IDS and all(i >= 0 for i in self.banned_ids),
            f"banned_ids must be at most {MAX_BANNED_IDS} ids >= 0",
            param="banned_token_ids",
        )
        _check_bias(self.logit_bias)
        self._check_noise()

    def _check_noise(self) -> None:
        _require(0 <= self.seed <= UINT64_MAX, f"seed must fit in 64 bits, got {self.seed}")
        if self.draft_key is not None:
            _require(0 <= self.draft_key <= UINT64_MAX, "draft_key must fit in 64 bits")
            _require(self.seed == 0, "a draft_key stands in the place of the seed")

    @property
    def effective_rule(self) -> Rule:
        """Acceptance rule that applies: greedy at temperature 0, otherwise the chosen rule."""
        if self.temperature == 0.0 or self.rule is Rule.GREEDY:
            return Rule.GREEDY
        return self.rule

    @property
    def draft_stream(self) -> NoiseStream | None:
        """Noise stream from which a drafter of this session draws; None if drafts need no noise."""
        return _DRAFT_STREAMS.get(self.effective_rule)

    def has_noise_stream(self, stream: NoiseStream) -> bool:
        """Return whether `stream_key` can return the key of this stream. A drafter's copy has one
        key only."""
        return self.draft_key is None or stream is self.draft_stream

    def stream_key(self, stream: NoiseStream) -> int:
        """Return the 64-bit key of a noise stream.

        Raises InvalidRequestError if this is a drafter's copy (`for_drafter`), which has only the
        key of the stream that drafts are drawn from.
        """
        if self.draft_key is None:
            return stream_key(self.seed, stream)
        if stream is not self.draft_stream:
            raise InvalidRequestError(
                f"the key of the {stream.name} stream stays with the verifier",
                reason="KEY_WITHHELD",
            )
        return self.draft_key

    def for_drafter(self) -> SamplingParams:
        """Return these parameters without the seed.

        A drafter receives only the key of the stream from which drafts are drawn, never the
        acceptance randomness.
        """
        if self.draft_key is not None:
            return self
        stream = self.draft_stream
        return self.with_noise(draft_key=0 if stream is None else self.stream_key(stream))

    def with_noise(self, *, seed: int = 0, draft_key: int | None = None) -> SamplingParams:
        """Return a copy of these parameters with another seed or draft key. Other fields are not
        checked again.

        Raises InvalidRequestError if the seed or the key is invalid.
        """
        other: SamplingParams = object.__new__(SamplingParams)
        for name in _PARAMETERS:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        object.__setattr__(other, "draft_key", draft_key)
        other._check_noise()
        return other


_DRAFT_STREAMS = {Rule.COUPLED: NoiseStream.TARGET, Rule.REJECTION: NoiseStream.DRAFT}
_PARAMETERS = tuple(f.name for f in fields(SamplingParams) if f.name not in ("seed", "draft_key"))
