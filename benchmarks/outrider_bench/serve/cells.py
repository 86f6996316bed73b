"""Cells of the serving benchmark: all settings of one measurement, such as drafts, sampling and
load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from outrider.client import GenerateOptions
from outrider.client.local.config import COLOCATED, FUSED, SEPARATE
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule

PLAIN: Final = "plain"
PLACEMENTS: Final = (PLAIN, SEPARATE, COLOCATED, FUSED)
"""Placements to measure. Plain decoding comes first, because the others are compared with it."""
IN_PROCESS_PLACEMENTS: Final = (COLOCATED, FUSED)
NONE, AUTO, NGRAM = "none", "auto", "ngram"
TREE_TOP_K: Final = 8
BIAS: Final = 5.0
"""Bias added to the logits of BIASED_IDS. It is so large that it must be applied, but too small to
determine the text."""
BIASED_IDS: Final = (260, 282, 284)
SEED: Final = 1234
_SHAPE: Final = re.compile(r"(chain|tree|model)-(\d+)(?:x(\d+))?")
LOCK_STEP, AHEAD = "+lockstep", "+ahead"
_AHEAD: Final = re.compile(r"(.+?)(?:(\+lockstep)|\+ahead(\d*))")
LOOK_AHEAD: Final = {"0": 0, "1": 1, "auto": None}
"""Values of the flag --look-ahead: 0 for lock-step, 1 for look-ahead, None if the server
chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetting:
    """Draft settings of a session. With the defaults nothing is drafted."""

    method: DraftMethod = DraftMethod.NONE
    tokens: int | None = None
    """Draft tokens per round; None if the server chooses."""
    top_k: int = 1
    look_ahead: int | None = None
    """0 for lock-step, 1 for look-ahead, None if the server chooses."""
    fan_out: int | None = None
    """Number of outcomes for which drafts are prepared; None if the server chooses."""

    @property
    def name(self) -> str:
        """Name of the setting: none, auto, ngram, ngram-N, model, model-N, chain-N or tree-N, where
        N is the number of draft tokens.

        The suffix +lockstep or +ahead is added if `look_ahead` is set, and +aheadM if the fan-out
        is M.
        """
        if self.look_ahead is None:
            return self.shape
        if self.look_ahead == 0:
            return self.shape + LOCK_STEP
        return f"{self.shape}{AHEAD}{'' if self.fan_out is None else self.fan_out}"

    @property
    def shape(self) -> str:
        """Name of the setting without the suffix for lock-step or look-ahead."""
        if self.method is DraftMethod.NONE:
            return NONE
        if self.method is not DraftMethod.EAGLE3:
            return self.method.value if self.tokens is None else f"{self.method}-{self.tokens}"
        if self.tokens is None:
            return AUTO
        return f"{'chain' if self.top_k == 1 else 'tree'}-{self.tokens}"

    def options(self) -> GenerateOptions:
        """Return the request options that select this draft setting."""
        if self.method is DraftMethod.NONE:
            return {"speculate": False}
        wanted: GenerateOptions = {"drafter": self.method}
        if self.tokens is not None:
            wanted["draft_tokens"] = self.tokens
            wanted["draft_top_k"] = self.top_k
        if self.look_ahead is not None:
            wanted["look_ahead"] = self.look_ahead
        if self.fan_out is not None:
            wanted["fan_out"] = self.fan_out
        return wanted

    def within(self) -> DraftSetting:
        """Return the same setting without look-ahead and fan-out, for drafts that the verifier
        makes itself."""
        return replace(self, look_ahead=None, fan_out=None)


def parse_drafts(text: str) -> DraftSetting:
    """Return the draft setting with the name `text`, as `DraftSetting.name` describes it.

    A tree has up to 8 children per node unless the name contains another number, as in tree-32x4.
    Raises InvalidRequestError for an unknown name.
    """
    match = _AHEAD.fullmatch(text)
    if match is None:
        return _parse_shape(text)
    drafts, lock_step = _parse_shape(match[1]), match[2] is not None
    if drafts.method is DraftMethod.NONE:
        raise InvalidRequestError(f"{text!r}: nothing is drafted", reason="INVALID_FLAG")
    fan_out = int(match[3]) if match[3] else None
    return replace(drafts, look_ahead=0 if lock_step else 1, fan_out=fan_out)


def _parse_shape(text: str) -> DraftSetting:
    simple = {
        NONE: DraftSetting(),
        AUTO: DraftSetting(method=DraftMethod.EAGLE3),
        NGRAM: DraftSetting(method=DraftMethod.NGRAM),
        DraftMethod.MODEL.value: DraftSetting(method=DraftMethod.MODEL),
    }
    if text in simple:
        return simple[text]
    match = _SHAPE.fullmatch(text)
    if match is None or int(match[2]) < 1:
        raise InvalidRequestError(
            f"drafts are auto, ngram, model, chain-N, tree-N, tree-NxK or model-N, with +ahead, "
            f"+aheadN or +lockstep, not {text!r}",
            reason="INVALID_FLAG",
        )
    kind, tokens, top_k = match[1], int(match[2]), match[3]
    if kind == "model":
        return DraftSetting(method=DraftMethod.MODEL, tokens=tokens)
    width = int(top_k or TREE_TOP_K) if kind == "tree" else 1
    return DraftSetting(method=DraftMethod.EAGLE3, tokens=tokens, top_k=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSetting:
    """Sampling parameters and acceptance rule of a cell."""

    temperature: float = 0.0
    rule: str = Rule.COUPLED.value
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: bool = False
    ignore_eos: bool = False
    """Whether answers continue past the end-of-sequence token, up to --max-tokens."""

    def options(self) -> dict[str, Any]:
        """Return the request options: the temperature, and all other parameters that differ from
        their defaults."""
        wanted: dict[str, Any] = {"temperature": self.temperature}
        if self.temperature > 0.0:
            wanted["rule"] = self.rule
        for name, neutral in (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
            if getattr(self, name) != neutral:
                wanted[name] = getattr(self, name)
        if self.logit_bias:
            wanted["logit_bias"] = dict.fromkeys(BIASED_IDS, BIAS)
        if self.ignore_eos:
            wanted["ignore_eos"] = True
        return wanted

    @property
    def is_supported(self) -> bool:
        """Whether the client library supports all of these parameters."""
        return not self.logit_bias or "logit_bias" in GenerateOptions.__annotations__


SETS: Final = {
    "greedy": SamplingSetting(),
    "sampled": SamplingSetting(temperature=0.8),
    "sampled_1": SamplingSetting(temperature=1.0),
    "top_p": SamplingSetting(temperature=0.8, top_p=0.9),
    "min_p": SamplingSetting(temperature=0.8, min_p=0.05),
    "penalties": SamplingSetting(repetition_penalty=1.1),
    "bias": SamplingSetting(logit_bias=True),
    "rejection": SamplingSetting(temperature=0.8, rule=Rule.REJECTION.value),
    "target_only": SamplingSetting(temperature=0.8, rule=Rule.TARGET_ONLY.value),
}
"""Sampling settings by name, for --sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterHandicap:
    """Artificial slowdown of a drafter or of its link, to measure its effect. The default is
    none."""

    exchange_delay_ms: float = 0.0
    """Delay of all messages between drafter and verifiers in each direction, in milliseconds."""
    drafter_slowdown: float = 1.0
    """Factor by which the computations of the drafter are slowed down."""

    def __str__(self) -> str:
        parts = []
        if self.exchange_delay_ms:
            parts.append(f"{self.exchange_delay_ms:g} ms each way")
        if self.drafter_slowdown != 1.0:
            parts.append(f"drafts {self.drafter_slowdown:g}x as slow")
        return ", ".join(parts)


NO_HANDICAP: Final = DrafterHandicap()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCell:
    """All settings of one measurement."""

    model: str
    placement: str
    drafts: DraftSetting
    sampling: SamplingSetting
    sessions: int | None
    """Number of concurrent requests; None in an open loop."""
    rate: float | None = None
    """Arriving requests per second in an open loop; None in a closed loop."""
    max_tokens: int = 256
    busy_polling_cores: int = 0
    handicap: DrafterHandicap = NO_HANDICAP
    planner: str | None = None
    """"automatic" or "fixed". With None it is the default or, behind a running router, that of its
    verifiers."""
    verifiers: int = 1
    drafters: int = 0
    """Number of drafters behind the router."""
    routers: int = 1
    prefix_cache: bool = True
    """Whether the verifiers use a prefix cache."""
    device_exchange: bool = False
    """Whether verifiers and drafters use the device exchange."""
    batch_invariant: bool = False
    """Whether the verifiers run with `--batch-invariant`: the result of a token then does not
    depend on the other tokens of its batch."""

    @property
    def plain(self) -> BenchCell:
        """Cell with the same requests and services, but without drafts."""
        sampling = replace(self.sampling, rule=Rule.COUPLED.value)
        return replace(
            self,
            placement=PLAIN,
            drafts=DraftSetting(),
            sampling=sampling,
            device_exchange=False,
        )

    def described(self) -> dict[str, object]:
        """Return the fields that identify a cell in service.json."""
        return {
            "model": self.model,
            "placement": self.placement,
            "drafts": self.drafts.name,
            "draft_top_k": self.drafts.top_k,
            "look_ahead": self.drafts.look_ahead,
            "fan_out": self.drafts.fan_out,
            **asdict(self.sampling),
            "rule": self.sampling.rule if self.sampling.temperature > 0.0 else Rule.GREEDY.value,
            "sessions": self.sessions,
            "rate": self.rate,
            "max_tokens": self.max_tokens,
            "busy_polling_cores": self.busy_polling_cores,
            **asdict(self.handicap),
            "planner": self.planner,
            "verifiers": self.verifiers,
            "drafters": self.drafters,
            "routers": self.routers,
            "prefix_cache": self.prefix_cache,
            "device_exchange": self.device_exchange,
            "batch_invariant": self.batch_invariant,
        }

    def __str__(self) -> str:
        drawn = self.sampling.options()
        parameters = ", ".join(f"{k} {v}" for k, v in drawn.items() if k != "logit_bias")
        load = f"{self.sessions} at a time" if self.rate is None else f"{self.rate:g} requests/s"
        bias = ", bias" if self.sampling.logit_bias else ""
        slowed = f", {self.handicap}" if str(self.handicap) else ""
        fronts = f", {self.routers} routers" if self.routers > 1 else ""
        cold = "" if self.prefix_cache else ", no prefix cache"
        cold += ", device exchange" if self.device_exchange else ""
        cold += ", batch-invariant" if self.batch_invariant else ""
        drafts = f"{self.placement} {self.drafts.name}"
        return f"{drafts}, {parameters}{bias}, {load}{slowed}{fronts}{cold}"


KEY_FIELDS: Final = (
    *("model", "placement", "drafts", "draft_top_k", "temperature", "rule", "top_p", "min_p"),
    *("repetition_penalty", "logit_bias", "sessions", "rate", "max_tokens", "busy_polling_cores"),
    *("look_ahead", "fan_out", "exchange_delay_ms", "drafter_slowdown"),
    *("planner", "verifiers", "drafters", "routers", "prefix_cache", "device_exchange"),
    "batch_invariant",
)
_BEFORE: Final = {
    "routers": 1,
    "prefix_cache": False,
    "device_exchange": False,
    "batch_invariant": False,
}
"""Values of fields that are missing in older results."""
_AHEAD_KEYS: Final = ("drafts", "look_ahead", "fan_out")
_PLACING: Final = (
    *("placement", "drafts", "draft_top_k", "busy_polling_cores"),
    *("look_ahead", "fan_out", "exchange_delay_ms", "drafter_slowdown", "planner", "drafters"),
    "device_exchange",
)
_SAMPLING: Final = (*("temperature", "rule", "top_p", "min_p", "repetition_penalty", "logit_bias"),)


def handicap_of(cell: dict[str, Any]) -> str:
    """Return the label of the handicap of a cell's drafter, in parentheses; "" if there is none."""
    said = str(
        DrafterHandicap(
            exchange_delay_ms=cell.get("exchange_delay_ms", 0.0),
            drafter_slowdown=cell.get("drafter_slowdown", 1.0),
        )
    )
    return f" ({said})" if said else ""


def cell_key(cell: dict[str, Any]) -> tuple[object, ...]:
    """Return the key of a cell in service.json. A cell replaces an older one with the same key."""
    return _values(cell)


def plain_key(cell: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that is the same for a cell and for the plain cell that it is compared with."""
    # Plain decoding has nothing to accept: its text is drawn alike under every rule.
    return _values(cell, but=(*_PLACING, "rule"))


def lock_step_key(cell: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that is the same for a cell and for the lock-step cell that it is compared
    with."""
    shape = str(cell["drafts"]).partition("+")[0]
    return (shape, *_values(cell, but=_AHEAD_KEYS))


def greedy_key(cell: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that is the same for a cell and for the greedy cell whose round time it is
    compared with."""
    return _values(cell, but=_SAMPLING)


def _values(cell: dict[str, Any], but: Sequence[str] = ()) -> tuple[object, ...]:
    """Return the values of the fields that identify a cell, except those named in `but`."""
    return tuple(cell.get(name, _BEFORE.get(name)) for name in KEY_FIELDS if name not in but)


def parse_list(text: str, allowed: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names in the comma-separated value `text` of the flag `what`. Raises
    InvalidRequestError for a name that is not in `allowed`, and for an empty list."""
    names, known = tuple(part.strip() for part in text.split(",") if part.strip()), tuple(allowed)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidRequestError(
            f"{what}: {text!r} must be a list of {', '.join(known)}", reason="INVALID_FLAG"
        )
    return names
