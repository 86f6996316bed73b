"""Tests use what modules offer, not how they are made: the number of accesses to private attributes
of the serving packages only falls (`python -m tools.private_access`)."""

from __future__ import annotations

import pytest

from tools.private_access import Access, accesses, accesses_by_file, private_names

CEILINGS = {
    "tests/unit/speculation/test_in_process_controller.py": 4,
    "tests/unit/verifier/model_runner/test_columnar_results.py": 2,
    "tests/unit/verifier/planner/test_in_process_planner.py": 3,
    "tests/unit/verifier/planner/test_load_burst_hold.py": 9,
}
"""Accesses that are left, by file. Numbers only fall, and no file is added."""


def test_accesses_to_private_attributes_only_become_fewer() -> None:
    found = accesses_by_file(["tests"])
    too_many = {path: rows for path, rows in found.items() if len(rows) > CEILINGS.get(path, 0)}
    assert not too_many
    too_high = [path for path, count in CEILINGS.items() if len(found.get(path, ())) < count]
    assert not too_high, "these ceilings can be lowered"


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
