"""What a PromQL expression asks for: names of metrics, and labels that it selects by."""

from __future__ import annotations

import re
from collections.abc import Iterator

_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"")


def metric_names(expression: str) -> set[str]:
    """Names of the metrics, histograms' with their suffixes."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _STRING.sub('""', expression))
    bare = re.sub(r"\boffset\s+\w+", "", _GROUPING.sub("", bare))
    return {name for name in _NAME.findall(bare) if name not in _WORDS}


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each selected metric with the labels that it is selected by."""
    for name, inside in _SELECTOR.findall(_STRING.sub('""', expression)):
        yield name, set(_LABEL.findall(inside))


def ready_for_prometheus(expression: str) -> str:
    """An expression of the board with Grafana's variables filled in: everything, five minutes."""
    filled = expression.replace("$__rate_interval", "5m")
    return re.sub(r"\$(cluster|namespace|fleet|model|router|verifier|drafter)\b", ".*", filled)
