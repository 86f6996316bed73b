"""pytest plugin: Triton's interpreter looks for functions to replace once per launch.

Without it the interpreter goes through all names of `triton.language` again at every call of a
device function, which takes a fifth of the time of kernels that run in it.
"""

from __future__ import annotations

import os
from importlib import import_module
from inspect import ismodule
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Replace the interpreter's search where kernels run in it."""
    del config
    if os.environ.get("TRITON_INTERPRET") == "1":
        _patch_once_per_launch(import_module("triton.runtime.interpreter"))


def _patch_once_per_launch(interpreter: Any) -> None:
    patch_lang, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    modules = (interpreter.tl, interpreter.tl.core)
    known: dict[Any, frozenset[int]] = {}
    """Indices of the modules that a function calls by name."""
    patched: set[int] = set()
    """Indices of the modules that the running launch has patched."""

    def patch(function: Any) -> Any:
        found = known.get(function)
        if found is None:
            values = [v for v in function.__globals__.values() if ismodule(v) and v in modules]
            found = known[function] = frozenset(modules.index(v) for v in values)
        if found and found <= patched:
            return scope_class()
        is_launch = not patched
        scope = patch_lang(function)
        patched.update(found)
        if is_launch:
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch
