"""Refuses JSON schemas with references that lead only to themselves. Pure.

The grammar library accepts them, and an answer would then come to a place that nothing can follow.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from outrider.errors import InvalidRequestError

_INDEX: Final = re.compile("[0-9]{1,9}")
_ALTERNATIVES: Final = ("anyOf", "oneOf")
_MAPS: Final = ("properties", "patternProperties")
_LISTS: Final = (*_ALTERNATIVES, "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties")
"""Keywords whose values are maps of schemas, lists of schemas, and single schemas."""


def check_recursion(schema: object) -> None:
    """Refuse a JSON schema with a reference that leads to itself before any character of a value,
    such as `{"$defs": {"x": {"$ref": "#/$defs/x"}}}`. Objects and arrays may hold values of their
    own schema. Parts that the schema does not use are ignored.

    The time is proportional to the size of the schema. Raises InvalidRequestError (reason
    INVALID_STRUCTURE).
    """
    if not isinstance(schema, dict):
        return
    parts = _Parts(schema)
    for reference, target in parts.targets.items():
        if id(target) not in parts.grounded:
            raise InvalidRequestError(
                f"structured output: the reference {reference[:64]!r} leads only to itself, so no "
                "value fits it",
                reason="INVALID_STRUCTURE",
                param="structured_outputs",
            )


class _Parts:
    """All parts of a schema that its root uses, and which of them are grounded: they do not only
    refer to each other.

    A part needs groups of other parts: it is grounded if some part of each group is. Each group is
    visited once for each part in it (unit propagation in Horn formulas).
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.targets: dict[str, dict[str, Any]] = {}
        """Parts that references lead to, by reference."""
        self.grounded: set[int] = set()
        """Ids of the grounded parts."""
        self._num_groups: dict[int, int] = {}
        """Number of groups without a part that is known to be grounded, by id of the part."""
        self._groups_of: defaultdict[int, list[tuple[int, list[bool]]]] = defaultdict(list)
        """By id of a part: ids of the parts that need it in a group, and whether the group has a
        grounded part, in a list of one element that all parts of the group share."""
        pending, found = [root], []
        while pending:
            part = pending.pop()
            if id(part) in self._num_groups:
                continue
            groups = [group for group in self._groups(part) if all(map(_is_part, group))]
            self._num_groups[id(part)] = len(groups)
            for group in groups:
                is_grounded = [False]
                for needed in group:
                    self._groups_of[id(needed)].append((id(part), is_grounded))
                pending += group
            if not groups:
                found.append(id(part))
            pending += filter(_is_part, _children(part))
        self._propagate(found)

    def _propagate(self, found: list[int]) -> None:
        while found:
            part = found.pop()
            self.grounded.add(part)
            for owner, is_grounded in self._groups_of[part]:
                if not is_grounded[0]:
                    is_grounded[0] = True
                    self._num_groups[owner] -= 1
                    if not self._num_groups[owner]:
                        found.append(owner)

    def _groups(self, part: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield the groups of parts that a part needs."""
        reference = part.get("$ref")
        if isinstance(reference, str):
            target = find_target(self._root, reference)
            if isinstance(target, dict):
                self.targets[reference] = target
                yield [target]
        for key in _ALTERNATIVES:
            if isinstance(part.get(key), list) and part[key]:
                yield part[key]
        for each in _as_list(part.get("allOf")):
            yield [each]


def find_target(schema: object, reference: str) -> object:
    """Return the part of a schema that a reference such as `#/$defs/name` names, or None if the
    schema has no such part."""
    start, *keys = reference.split("/")
    found: object = schema if start == "#" else None
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _children(part: dict[str, Any]) -> Iterator[Any]:
    """Yield the parts directly in a part, except for those that are used only by reference."""
    for key in _MAPS:
        if isinstance(part.get(key), dict):
            yield from part[key].values()
    for key in _LISTS:
        yield from _as_list(part.get(key))
    for key in _SINGLES:
        yield part.get(key)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_part(value: object) -> bool:
    return isinstance(value, dict)
