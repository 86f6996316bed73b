"""Widen a small model to the cost of a large one: `widen.py --model DIR --head DIR --out DIR`.

Writes OUT/target and OUT/head, which load like any checkpoint and compute the same function as the
originals (see `outrider_bench.gpu.support.widening`). The default shape has 14.4 GB of weights in
bfloat16. Benchmarks build it in memory instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from outrider_bench.gpu.support.widened_files import write_head, write_target
from outrider_bench.gpu.support.widening import WideSpec, widen_head, widen_target

from outrider.errors import OutriderError

__all__ = ["main", "widen_head", "widen_target", "write_head", "write_target"]


def main() -> int:
    """Run the tool and return the exit status."""
    shape = WideSpec()
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="target: directory or .gguf file")
    add("--head", type=Path, help="EAGLE-3 head of the target")
    add("--out", type=Path, required=True, help="directory to write target/ and head/ to")
    add("--hidden", type=int, default=shape.hidden_size)
    add("--intermediate", type=int, default=shape.intermediate_size)
    add("--layers", type=int, default=shape.num_layers)
    add("--heads", type=int, default=shape.num_heads)
    add("--kv-heads", type=int, default=shape.num_kv_heads)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    spec = WideSpec(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
    )
    dtype = getattr(torch, args.dtype)
    try:
        read = write_target(args.model, args.out / "target", spec, dtype=dtype, seed=args.seed)
        if args.head is not None:
            out = args.out / "head"
            write_head(args.head, args.model, out, spec, dtype=dtype, seed=args.seed + 1)
    except OutriderError as error:
        print(f"widen: {error.message}", file=sys.stderr)
        return 1
    print(f"{args.out}: a forward reads {read / 1e9:.2f} GB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
