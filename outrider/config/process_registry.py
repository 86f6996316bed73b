"""Registry of the processes that have a configuration, each with the name of its Python package.

This module does not import the packages of the processes. A command imports the package of a
process by name when the command needs the package.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config.description import ConfigTable, describe_config
from outrider.config.loader import LoadedConfig, parse_config
from outrider.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class ConfiguredProcess:
    """A process that has a configuration, such as the router."""

    role: str
    """Name of the process in commands, environment variables (OUTRIDER_<ROLE>_...) and file names.
    """
    title: str
    package: str
    config_name: str

    @property
    def config(self) -> type[Any]:
        """Configuration dataclass of the process. Raises NotFoundError if the package is
        missing."""
        found = getattr(self._module("config"), self.config_name)
        assert isinstance(found, type)
        return found

    @property
    def parser(self) -> argparse.ArgumentParser:
        """Parser of the process's command line. Raises NotFoundError if the package is missing."""
        parser = self._module("__main__").make_parser()
        assert isinstance(parser, argparse.ArgumentParser)
        return parser

    def load(self, argv: Sequence[str]) -> LoadedConfig[Any]:
        """Return the configuration of the process from a command line, the environment and the TOML
        file.

        Also checks the other files that the process reads before it loads a model. Raises
        NotFoundError, InvalidRequestError or FailedPreconditionError if the configuration or one of
        these files is missing or invalid.
        """
        loaded = parse_config(self.config, self.parser, argv, self.role)
        check_files = getattr(self._module("__main__"), "check_files", None)
        if check_files is not None:
            check_files(loaded.config)
        return loaded

    @property
    def table(self) -> ConfigTable:
        """Description of the process's configuration keys. Raises NotFoundError if the package is
        missing."""
        return describe_config(self.config)

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
        ConfiguredProcess("router", "Router", "outrider_router", "RouterConfig"),
        ConfiguredProcess("verifier", "Verifier", "outrider_verifier", "VerifierConfig"),
        ConfiguredProcess("drafter", "Drafter", "outrider_drafter", "DrafterConfig"),
        ConfiguredProcess("ray", "Ray launcher", "outrider_ray", "RayFleetConfig"),
    )
}
