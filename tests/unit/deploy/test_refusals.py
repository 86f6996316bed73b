"""Combinations of overlays and components that cannot work do not build, as the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deploy.combinations import (
    COMPONENTS,
    OVERLAYS,
    Combination,
    build,
    read_refusals,
    refusal,
    refusals,
)

REFUSED = "no matches for Id|nothing selected|already registered|does not exist|nonexistent key"


@pytest.mark.parametrize("pair", sorted(refusals()))
def test_a_combination_that_the_docs_refuse_does_not_build(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    first, later = pair
    if first in COMPONENTS:
        refused = Combination("cpu-demo", (first, later))
    else:
        refused = Combination(first, (later,))
    assert refusal(refused) == refusals()[pair]
    with pytest.raises(ValueError, match=REFUSED):
        build([refused], tmp_path)


def test_the_table_of_refusals_is_read_whole() -> None:
    assert {first for first, _ in refusals()} <= {*OVERLAYS, *COMPONENTS}
    assert {later for first, later in refusals() if first == "kuberay"} == {*COMPONENTS}
    assert ("tls", "tls") in refusals() and ("tls", "monitoring") not in refusals()
    assert all(reason.endswith(".") for reason in refusals().values())
    assert read_refusals("no table") == {}
