"""Selection of models, head and processes in the benchmarks, with the flags that they share."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.client.commands.placement_flags import add_placement_arguments, placement_of
from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.model_files import DEFAULT_MODEL, find_model
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider_bench.prompts import DEFAULT_PROMPTS


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all benchmarks that start services."""
    add_input_arguments(parser)
    add_placement_arguments(parser)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the models, the prompts and the output of a benchmark."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help=f"name or directory; default: {DEFAULT_MODEL}")
    add("--head", type=Path, help="draft head; default: the one that ships for the model")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs, else float32")
    add("--threads", type=int, default=2, help="compute threads of each process; default: 2")
    add("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSONL; default: the bundled 40")
    add("--limit", type=int, help="number of prompts; default: all")
    add("--out", type=Path, help="also write the result as JSON here")
    add("--json", action="store_true", help="last line of the output is one JSON object")


def describe_placement(config: LocalFleetConfig) -> dict[str, object]:
    """Return the fields of a result that state the device, dtype and placement of the models, and
    whether acceptance was simulated."""
    placing: dict[str, object] = {
        "dtype": config.element_type,
        "device": config.device,
        "placement": config.placement,
    }
    if config.simulated_acceptance:
        placing["SIMULATED_ACCEPTANCE"] = config.simulated_acceptance
    return placing


def local_config(
    args: argparse.Namespace, *, max_sessions: int | None = None, queue_limit: int | None = None
) -> LocalFleetConfig:
    """Return the configuration of the fleet that the flags select. Raises InvalidRequestError if
    there is no head for the model."""
    files = find_model(args.model, head=args.head)
    if files.head is None:
        raise InvalidRequestError(f"no head ships for {args.model}: give --head DIR")
    return LocalFleetConfig(
        model=files.path,
        model_name=files.name,
        head=files.head,
        methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM),
        dtype=args.dtype or "",
        **placement_of(args),
        threads=args.threads,
        # The planner would replace the draft shape that is to be measured.
        planner="fixed",
        # Repeated prompts are prefilled again, as in the systems that the result is compared with.
        prefix_cache=False,
        max_sessions=max_sessions,
        queue_limit=queue_limit,
    )
