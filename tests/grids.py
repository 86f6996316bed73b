"""Parameters of grids: those that run every time, and the rest."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def thorough(*values: object) -> ParameterSet:
    """A parameter of a grid that runs with --thorough only.

    For values between corners: what runs every time takes each branch that the whole grid takes,
    and says where it stands (the comment beside it) why the rest is left out.
    """
    return pytest.param(*values, marks=pytest.mark.thorough)
