"""Hooks: modules of an operator that change a process before it is built.

The setting `hooks` of a process lists the modules as "MODULE" or "MODULE:KEY=VALUE,KEY=VALUE". Each
module must have a function `install(hooks, *, key=...)`. `hooks` is a dataclass with the hook
points of the process, which the function fills in. The keyword-only parameters are the options of
the module. An option is a string, unless its annotation is int, float or bool.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from outrider.errors import InvalidRequestError

HooksT = TypeVar("HooksT")

_FORM: Final = "MODULE or MODULE:KEY=VALUE,KEY=VALUE"
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_TYPES: Final = {"str": str, "int": int, "float": float, "bool": bool}
"""Option types by name, because annotations with postponed evaluation are strings."""


@dataclass(frozen=True, slots=True)
class HookSpec:
    """One entry of the setting `hooks`, split into its parts."""

    module: str
    """Dotted name of the module."""
    options: Mapping[str, str]
    """Values of the options by name, not yet converted."""


def parse_hook(text: str) -> HookSpec:
    """Parse one entry of the setting `hooks` without importing the module.

    Raises InvalidRequestError (reason INVALID_HOOK) if the entry is malformed.
    """
    module, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not (equals and key.isidentifier()):
            raise _invalid(text, f"must be {_FORM}, and {part!r} is no KEY=VALUE")
        if key in options:
            raise _invalid(text, f"gives {key} twice")
        options[key] = value
    if not all(name.isidentifier() for name in module.split(".")):
        raise _invalid(text, f"must be {_FORM}, and {module!r} is no name of a module")
    return HookSpec(module, options)


def check_hooks(hooks: Sequence[str]) -> None:
    """Check the syntax of all entries of the setting `hooks` without importing the modules.

    Raises InvalidRequestError (reason INVALID_HOOK) if an entry is malformed.
    """
    for text in hooks:
        parse_hook(text)


def install_hooks(settings: Sequence[str], hooks: HooksT) -> HooksT:
    """Import the modules in `settings`, call the function `install` of each in order, and return
    `hooks`.

    Raises InvalidRequestError (reason INVALID_HOOK) if an entry is malformed, a module cannot be
    imported or has no `install`, an option is unknown, missing or invalid, or an `install` fails.
    """
    for text in settings:
        spec = parse_hook(text)
        install = _find_install(text, spec.module)
        options = _convert_options(text, install, spec.options)
        try:
            install(hooks, **options)
        except InvalidRequestError as error:
            raise _invalid(text, error.message) from error
        # The operator can fix every error of this module only by changing the setting or module.
        except Exception as error:
            kind = type(hooks).__name__
            raise _invalid(
                text, f"could not be installed in {kind}: {type(error).__name__}: {error}"
            ) from error
    return hooks


def _find_install(text: str, name: str) -> Callable[..., object]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _invalid(
            text,
            f"there is no module {error.name}; the modules of hooks must be installed, or on "
            "PYTHONPATH",
        ) from error
    except Exception as error:
        raise _invalid(
            text, f"{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    install = getattr(module, "install", None)
    if not callable(install):
        raise _invalid(text, f"{name} must have a function install(hooks, **options)")
    found: Callable[..., object] = install
    return found


def _convert_options(
    text: str, install: Callable[..., object], given: Mapping[str, str]
) -> dict[str, object]:
    """Return the options `given`, converted to the types of the parameters of `install`.

    Raises InvalidRequestError (reason INVALID_HOOK) if an option is unknown, missing or invalid.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(install).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    known = ", ".join(sorted(parameters)) or "none"
    for key in given:
        if key not in parameters:
            raise _invalid(text, f"unknown option {key} (known: {known})")
    for name, parameter in parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise _invalid(text, f"the option {name} must be given (known: {known})")
    return {key: _convert(text, parameters[key], value) for key, value in given.items()}


def _convert(text: str, parameter: inspect.Parameter, value: str) -> object:
    name, said = parameter.name, parameter.annotation
    if said is inspect.Parameter.empty:
        return value
    kind: type[Any] | None = _TYPES.get(said if isinstance(said, str) else said.__name__)
    if kind is None:
        raise _invalid(text, f"install must take {name} as one of {', '.join(_TYPES)}")
    if kind is bool:
        if value.lower() not in _BOOLEANS:
            raise _invalid(text, f"{name} must be true or false, got {value!r}")
        return _BOOLEANS[value.lower()]
    try:
        converted = kind(value)
    except ValueError:
        converted = math.nan
    if kind is not str and not math.isfinite(converted):
        what = "an integer" if kind is int else "a finite number"
        raise _invalid(text, f"{name} must be {what}, got {value!r}")
    return converted


def _invalid(text: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"hook {text!r}: {message}", reason="INVALID_HOOK")
