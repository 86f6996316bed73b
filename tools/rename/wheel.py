"""The lists of tools/compiled_wheel.py: which modules are compiled, by folder."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tools.rename.tables import ROOTS

WHEEL: Final = "tools/compiled_wheel.py"


def compiled_modules(root: Path) -> set[str]:
    """Paths of the modules that the wheel compiles, from the root of the repository."""
    spec = importlib.util.spec_from_file_location("wheel_lists", root / WHEEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = set()
    for name in module.modules(root):
        found.add(next(base + name for base in ROOTS if (root / (base + name)).is_file()))
    return found


def rewrite_wheel_lists(root: Path, compiled: set[str], moves: Mapping[str, str]) -> None:
    """Let the same modules be compiled at their new paths. Raises ValueError if others are."""
    path = root / WHEEL
    text = path.read_text()
    wanted = {moves.get(name, name) for name in compiled}
    reasons = _reasons(text)
    begin = text.index("PACKAGES: Final")
    end = text.index("}\n", begin)
    head = text[begin : text.index("{\n", begin) + 2]
    folders = sorted({str(PurePosixPath(name).parent) for name in wanted})
    listed = [f for f in folders if _was_listed(f, text[begin:end], moves)]
    lines = [head.rstrip("\n")]
    for folder in listed:
        left: defaultdict[str, list[str]] = defaultdict(list)
        for file in sorted((root / folder).glob("*.py")):
            name = f"{folder}/{file.name}"
            if not file.name.startswith("__") and name not in wanted:
                before = next((old for old, new in moves.items() if new == name), name)
                left[reasons.get(before, "")].append(file.stem)
        if not left:
            lines.append(f'    "{folder}": (),')
            continue
        lines.append(f'    "{folder}": (')
        for reason, stems in left.items():
            lines += [f"        {line}" for line in reason.split("\n") if line]
            lines += [f'        "{stem}",' for stem in stems]
        lines.append("    ),")
    text = text[:begin] + "\n".join(lines) + "\n" + text[end:]
    single = sorted(name for name in wanted if str(PurePosixPath(name).parent) not in listed)
    block = "MODULES: Final = (\n" + "".join(f'    "{name}",\n' for name in single) + ")"
    text = re.sub(r"MODULES: Final = \([^)]*\)", lambda _: block, text)
    text = text.replace(
        'package = package if package.parts[0] == "outrider" else Path(package.name)',
        'package = package if package.parts[0] == "outrider" else Path(*package.parts[1:])',
    )
    path.write_text(text)
    found = compiled_modules(root)
    if found != wanted:
        raise ValueError(f"compiled modules differ: {sorted(found ^ wanted)}")


def _was_listed(folder: str, packages: str, moves: Mapping[str, str]) -> bool:
    """Whether a folder, or one that its modules came from, was listed as a whole."""
    before = {str(PurePosixPath(o).parent) for o, n in moves.items() if n.startswith(folder + "/")}
    return any(f'"{name}": (' in packages for name in {folder, *before})


def _reasons(text: str) -> dict[str, str]:
    """The comment above each module that is left as it is."""
    folder, comment, after_item = "", "", True
    reasons: dict[str, str] = {}
    begin = text.index("PACKAGES: Final")
    for line in text[begin : text.index("}\n", begin)].split("\n"):
        stripped = line.strip()
        if found := re.match(r'    "([\w/]+)": \(', line):
            folder, comment, after_item = found[1], "", True
            stripped = line[line.index("(") + 1 :]
        if stripped.startswith("#"):
            comment = stripped if after_item else f"{comment}\n{stripped}"
            after_item = False
            continue
        for stem in re.findall(r'"(\w+)"', stripped):
            reasons[f"{folder}/{stem}.py"] = comment
            after_item = True
    return reasons
