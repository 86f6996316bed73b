"""Tests use what modules offer, not how they are made: none touches a private attribute of the
serving packages (`python -m tools.private_access`)."""

from __future__ import annotations

import pytest

from tools.private_access import Access, accesses, accesses_by_file, private_names


def test_no_test_touches_a_private_attribute() -> None:
    assert not accesses_by_file(["tests"])


def test_there_are_private_names_to_look_for() -> None:
    assert len(private_names()) > 1000


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("thing._size = 1", ["_size"]),
        ("thing().part._size", ["_size"]),
        ("class Fake:\n    def __init__(self): self._size = self._size", []),
        ("class Fake(Thing):\n    def double(self): return 2 * self._size", ["_size"]),
        ("from outrider.thing import _size, other", ["_size"]),
        ("getattr(thing, '_size', 0)", ["_size"]),
        ("monkeypatch.setattr(thing, '_size', 3)", ["_size"]),
        ("monkeypatch.setattr('outrider.thing._size', 3)", ["_size"]),
        ("patch.object(Thing, '_size', 3)", ["_size"]),
        ("thing._other, thing.__dict__, thing.size", []),
        ("row._replace(size=1)", []),
    ],
)
def test_an_access_is_one_to_a_name_of_the_packages_that_is_not_the_tests_own(
    source: str, names: list[str]
) -> None:
    found = accesses(source, frozenset({"_size"}))
    assert [access.name for access in found] == names
    assert all(isinstance(access, Access) and access.line for access in found)
