"""Table of the tensors that a model requires, and the check of a checkpoint against it.

A checkpoint with other tensors is refused, because a tensor outside the table, such as the scale of
a quantised weight, would be ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.checkpoints.quantization import SUPPORTED, WEIGHT_DTYPES
from outrider.checkpoints.safetensors_header import StoredTensor
from outrider.errors import InvalidRequestError

_PREFIX: Final = "model."
_LAYER: Final = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)")
_IGNORED_SUFFIX: Final = "rotary_emb.inv_freq"
"""Suffix of tensors that are ignored: RoPE frequencies, which follow from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Required shape and dtype of one tensor of a model."""

    shape: tuple[int, ...] | None
    """Required shape; None accepts every shape."""
    is_required: bool = True
    dtypes: tuple[str, ...] = WEIGHT_DTYPES
    """Supported element types, by their names in the file's format. An empty tuple accepts every
    type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """Requirements on all tensors of a model. `single` is keyed by full names. The tensors of
    `layer` occur once in each layer."""

    single: Mapping[str, TensorSpec]
    layer: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Requirements on the tensors of a layer, by the part of their names after
    `model.layers.N.`."""
    num_layers: int = 0
    hints: Mapping[str, str] = field(default_factory=dict)
    """Advice by tensor name. It is added to the error that a required tensor is missing."""

    def find(self, name: str) -> TensorSpec | None:
        """Return the requirements on a tensor; None if the model has no such tensor."""
        if match := _LAYER.fullmatch(name):
            return self.layer.get(match[2]) if int(match[1]) < self.num_layers else None
        return self.single.get(name)

    def required_names(self) -> Iterator[str]:
        """Yield the names of the tensors that a checkpoint must hold."""
        yield from (name for name, spec in self.single.items() if spec.is_required)
        for index in range(self.num_layers):
            for name, spec in self.layer.items():
                if spec.is_required:
                    yield f"model.layers.{index}.{name}"

    def check(self, where: str, tensors: Mapping[str, StoredTensor], *, reason: str) -> None:
        """Check the names, dtypes and shapes of a checkpoint's tensors.

        Raises InvalidRequestError with `reason` for tensors that are unknown, missing, of an
        unsupported dtype or of another shape. `where` names the checkpoint in this error.
        """
        problem = self._find_problem(tensors)
        if problem is not None:
            raise InvalidRequestError(f"{where}: {problem}", reason=reason)

    def _find_problem(self, tensors: Mapping[str, StoredTensor]) -> str | None:
        present = [name for name in tensors if not name.endswith(_IGNORED_SUFFIX)]
        unknown = sorted(name for name in present if self.find(name) is None)
        if unknown:
            return self._explain_unknown(unknown, tensors)
        shapes: list[str] = []
        for name in sorted(present):
            spec, tensor = self.find(name), tensors[name]
            assert spec is not None
            if spec.dtypes and tensor.dtype not in spec.dtypes:
                return (
                    f"{name} is stored as {tensor.dtype}, which is not supported "
                    f"(allowed: {', '.join(spec.dtypes)}); {SUPPORTED}"
                )
            if spec.shape is not None and tensor.shape != spec.shape:
                shapes.append(
                    f"{name} must have shape {spec.shape}, not {tensor.shape}: "
                    "config and weights do not belong together"
                )
        missing = next((name for name in self.required_names() if name not in tensors), None)
        if missing is not None:
            stored = {int(match[1]) for name in present if (match := _LAYER.fullmatch(name))}
            if (match := _LAYER.fullmatch(missing)) and stored == set(range(int(match[1]))):
                return self._explain_layers(len(stored))
            return f"the checkpoint has no tensor {missing!r}{self.hints.get(missing, '')}"
        return shapes[0] if shapes else None

    def _explain_unknown(self, unknown: list[str], tensors: Mapping[str, StoredTensor]) -> str:
        """Return an explanation why a checkpoint has tensors that are not in the table."""
        first = unknown[0] + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
        if not any(name.startswith(_PREFIX) for name in tensors) and any(
            self.find(_PREFIX + name) for name in unknown
        ):
            return (
                f"the names of the tensors lack the prefix {_PREFIX!r}, as in {unknown[0]}. "
                "Save the weights with the names of the whole language model"
            )
        extra = [match for name in unknown if (match := _LAYER.fullmatch(name))]
        if len(extra) == len(unknown) and all(
            int(match[1]) >= self.num_layers and match[2] in self.layer for match in extra
        ):
            stored = 1 + max(int(match[1]) for match in extra)
            return self._explain_layers(stored)
        return (
            f"unexpected tensor {first}. The model that config.json describes does not have it, "
            f"and without it the text could be wrong. If the weights are quantised: {SUPPORTED}"
        )

    def _explain_layers(self, stored: int) -> str:
        return (
            f"config.json has {self.num_layers} layers (num_hidden_layers), the weights have "
            f"{stored}"
        )
