"""Combinations of overlays and components, and Kustomize's build of many of them in one process.

A combination is an overlay and the components that another overlay lists on top of it, in order.
`docs/deploy-kubernetes.md` has the table of those that are refused.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from tests.unit.deploy.manifests import Document
from tests.unit.deploy.support import ROOT, TOOL_S, parse, tool

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = tuple(sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml")))
COMPONENTS = tuple(sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml")))
_ROW = re.compile(r"^\| (?P<first>[^|]+) \| (?P<later>[^|]+) \| (?P<reason>[^|]+) \|$", re.M)


@dataclass(frozen=True)
class Combination:
    """An overlay and the components on top of it."""

    overlay: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join((self.overlay, *self.components))

    def members(self) -> Iterator[str]:
        """The overlay's own components, its name, then the components on top, in order."""
        yield from _members_of(K8S / "overlays" / self.overlay)
        yield self.overlay
        yield from self.components


@cache
def _members_of(folder: Path) -> tuple[str, ...]:
    """The components that an overlay consists of, in the order of their application."""
    found: list[str] = []
    text = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    for resource in text.get("resources", ()):
        if (folder / resource).is_dir():
            found += _members_of((folder / resource).resolve())
    found += [Path(component).name for component in text.get("components", ())]
    return tuple(found)


def read_refusals(markdown: str) -> dict[tuple[str, str], str]:
    """The table "first | later | reason" of a page: (first, later) by name, and the reason."""
    table = markdown.partition("| listed first | listed later | reason |")[2].partition("\n\n")[0]
    refusals: dict[tuple[str, str], str] = {}
    for row in _ROW.finditer(table):
        firsts = re.findall(r"`([\w-]+)`", row["first"])
        names = re.findall(r"`([\w-]+)`", row["later"])
        later = COMPONENTS if row["later"] == "any component" else tuple(names)
        pairs = zip(firsts, firsts, strict=True) if row["later"] == "itself" else ()
        for pair in (*pairs, *product(firsts, later)):
            refusals[pair] = row["reason"]
    return refusals


@cache
def refusals() -> dict[tuple[str, str], str]:
    """The table of the docs."""
    return read_refusals((ROOT / "docs" / "deploy-kubernetes.md").read_text("utf-8"))


def refusal(combination: Combination) -> str | None:
    """Why the docs refuse a combination, or None."""
    members = list(combination.members())
    own = len(members) - len(combination.components)
    for at, later in enumerate(members):
        for first in members[:at]:
            # What an overlay itself lists is built by its own test.
            if at >= own and (first, later) in refusals():
                return refusals()[first, later]
    return None


def every_combination() -> Iterator[Combination]:
    """Every overlay with every component and with every ordered pair of components."""
    for overlay in OVERLAYS:
        for component in COMPONENTS:
            yield Combination(overlay, (component,))
        for pair in product(COMPONENTS, COMPONENTS):
            yield Combination(overlay, pair)


def build(combinations: Iterable[Combination], folder: Path) -> dict[str, list[Document]]:
    """Build combinations in one process, each in a namespace of its own; manifests by namespace.

    `folder` is empty. The namespaces are team-0, team-1 and so on, in the order of the
    combinations. Raises ValueError with what Kustomize says if one of them does not build.
    """
    up = os.path.relpath(K8S, folder / "each")
    names = []
    for number, combination in enumerate(combinations):
        names.append(f"team-{number}")
        (folder / names[-1]).mkdir()
        kustomization = {
            "namespace": names[-1],
            "resources": [f"{up}/overlays/{combination.overlay}"],
            "components": [f"{up}/components/{name}" for name in combination.components],
        }
        if "ray" not in combination.overlay:
            kustomization["transformers"] = [f"{up}/transformers/namespace"]
        text = yaml.safe_dump(kustomization)
        (folder / names[-1] / "kustomization.yaml").write_text(text, "utf-8")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": names}), "utf-8")
    command = [tool("kubectl"), "kustomize", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)
    if result.returncode or result.stderr:
        raise ValueError(result.stderr)
    found: dict[str, list[Document]] = {name: [] for name in names}
    for document in parse(result.stdout):
        own = document["metadata"]
        found[own["name"] if document["kind"] == "Namespace" else own["namespace"]].append(document)
    return found
