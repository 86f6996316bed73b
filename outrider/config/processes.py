"""The processes that have a configuration, found by the names of their packages.

The library imports no process: it asks for a package by its name when a command wants it, as it
starts processes by their names.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Any

from outrider.config.describing import Table, describe
from outrider.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Process:
    """One kind of process."""

    role: str
    """Its name here, in variables (OUTRIDER_<ROLE>_...) and of its files."""
    title: str
    package: str
    config_name: str

    @property
    def config(self) -> type[Any]:
        """The dataclass. Raises NotFoundError if the package is not installed."""
        found = getattr(self._module("config"), self.config_name)
        assert isinstance(found, type)
        return found

    @property
    def parser(self) -> argparse.ArgumentParser:
        """Its command line. Raises NotFoundError."""
        parser = self._module("__main__").make_parser()
        assert isinstance(parser, argparse.ArgumentParser)
        return parser

    @property
    def table(self) -> Table:
        """Its keys. Raises NotFoundError."""
        return describe(self.config)

    def _module(self, name: str) -> Any:
        try:
            return importlib.import_module(f"{self.package}.{name}")
        except ModuleNotFoundError as error:
            raise NotFoundError(
                f"{self.package} cannot be imported here: no module {error.name}",
                reason="NOT_INSTALLED",
            ) from error


PROCESSES = {
    process.role: process
    for process in (
        Process("router", "Router", "outrider_router", "RouterConfig"),
        Process("verifier", "Verifier", "outrider_verifier", "VerifierConfig"),
        Process("drafter", "Drafter", "outrider_drafter", "DrafterConfig"),
        Process("ray", "Ray launcher", "outrider_ray", "LaunchConfig"),
    )
}
