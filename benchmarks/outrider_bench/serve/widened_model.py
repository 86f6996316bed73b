"""Widened model of the serving benchmark: written to disk once, then reused.

A small model and its head are padded so that they cost as much as large ones. A separate process
(`python -m outrider_bench.serve.widened_model`) writes them, so that all its memory is freed
afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from outrider.client.local.model_files import DEFAULT_MODEL, ModelFiles, find_model
from outrider.errors import InternalError, InvalidRequestError
from outrider.models.pull import outrider_home
from outrider_bench.report import print_progress

WIDENED: Final = "widened"
"""Value of --model that selects SmolLM2-135M at the cost of an 8B model."""
EIGHT_B: Final = "4096,14336,32,64,16"
"""Default shape of the widened model: hidden size, MLP size, and numbers of layers, heads and KV
heads."""


def bench_model(
    name: str, head: Path | None, *, wide: str | None, dtype: str, device: str
) -> ModelFiles:
    """Return the files of the model that --model `name` selects. A widened model is first written
    to disk if it is not there.

    `wide` is the shape of the widened model; None selects that of an 8B model. Raises NotFoundError
    for an unknown name, and InvalidRequestError if there is no head to widen.
    """
    if name != WIDENED and wide is None:
        return find_model(name, head=head)
    base = find_model(DEFAULT_MODEL if name == WIDENED else name, head=head)
    if base.head is None:
        raise InvalidRequestError(f"no head ships for {base.name}: give --head DIR")
    shape = wide or EIGHT_B
    out = outrider_home() / WIDENED / f"{base.name}-{shape.replace(',', 'x')}-{dtype}"
    if not (out / "target" / "config.json").is_file():
        _make(base.path, base.head, out, shape=shape, dtype=dtype, device=device)
    return ModelFiles(name=f"{base.name}-{WIDENED}", path=out / "target", head=out / "head")


def _make(model: Path, head: Path, out: Path, *, shape: str, dtype: str, device: str) -> None:
    """Write the widened model and head. The folder `out` appears only when it is complete."""
    print_progress(f"widening {model.name} to {shape} in {dtype}: {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=out.parent))
    flags = ("--model", model, "--head", head, "--out", partial)
    kind = ("--wide", shape, "--dtype", dtype, "--device", device)
    command = [
        sys.executable,
        "-m",
        "outrider_bench.serve.widened_model",
        *map(str, (*flags, *kind)),
    ]
    try:
        if subprocess.run(command, check=False).returncode:
            raise InternalError("the model could not be widened", reason="WIDEN")
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> int:
    """Write a widened model and return the exit status."""
    import torch

    from outrider_bench.gpu.support.benchmark_context import wide_spec
    from outrider_bench.gpu.support.widened_files import write_head, write_target

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "head", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("wide", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    spec, dtype = wide_spec(args.wide), getattr(torch, args.dtype)
    write_target(args.model, args.out / "target", spec, dtype=dtype, device=args.device)
    write_head(args.head, args.model, args.out / "head", spec, dtype=dtype, device=args.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
