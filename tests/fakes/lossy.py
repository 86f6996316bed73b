"""A real verifier or drafter on a CPU that behaves as if its device were lost after some work.

python -m tests.fakes.lossy --lose verifier|drafter --after CALLS FLAGS...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lose", choices=("verifier", "drafter"), required=True)
    parser.add_argument("--after", type=int, required=True)
    own, flags = parser.parse_known_args()
    if own.lose == "verifier":
        from outrider_verifier.__main__ import main as run
        from outrider_verifier.model_runner.cpu_runner import CpuModelRunner

        break_after(own.after, CpuModelRunner, "collect_round")
    else:
        from outrider_drafter.__main__ import main as run
        from outrider_drafter.proposers.eagle import EagleProposer

        break_after(own.after, EagleProposer, "draft_sessions")
    return run(flags)


def break_after(calls: int, kind: Any, method: str) -> None:
    """Let a method fail from some call on, and `is_usable` be False from then on."""
    real: Callable[..., Any] = getattr(kind, method)
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            kind.is_usable = False
            raise RuntimeError("an illegal memory access was encountered")
        return real(*args)

    setattr(kind, method, counted)


if __name__ == "__main__":
    sys.exit(main())
