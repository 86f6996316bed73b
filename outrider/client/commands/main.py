"""The `outrider` command: parses the command line and runs a subcommand.

The exit status is 0 for success; 2 for invalid flags, files or requests; 130 for an interrupt; and
1 for any other error. An error is printed as one line on stderr, never as a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import outrider
from outrider.client.commands.module_runner import run_module
from outrider.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
)

EXIT_FAILED = 1
EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130

BENCH_MODULE = "outrider_bench"
CHAOS_MODULE = "outrider_chaos"
CONFIG_MODULE = "outrider.config"
RAY_MODULE = "outrider_ray"
TRAINING_MODULE = "outrider.engine.training"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except OutriderError as error:
        sys.stderr.write(f"outrider: {error.message}\n")
        misuse = (InvalidRequestError, NotFoundError, FailedPreconditionError)
        return EXIT_MISUSE if isinstance(error, misuse) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; there is nobody left to tell.
        sys.stderr.close()
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    # These have parsers of their own: everything after their name is theirs, --help too.
    if arguments[:1] == ["train-head"]:
        return run_module(TRAINING_MODULE, arguments[1:])
    if arguments[:1] == ["bench"]:
        return run_module(BENCH_MODULE, arguments[1:])
    if arguments[:1] == ["chaos"]:
        return run_module(CHAOS_MODULE, arguments[1:])
    if arguments[:1] == ["config"]:
        return run_module(CONFIG_MODULE, arguments[1:])
    if arguments[:1] == ["ray"]:
        return run_module(RAY_MODULE, arguments[1:])
    args = parse_arguments(arguments)
    match args.command:
        case "generate":
            from outrider.client.commands import generate

            return generate.run(args)
        case "serve":
            from outrider.client.commands import serve

            return serve.run(args)
        case "status":
            from outrider.client.commands import status

            return status.run(args)
        case "certs":
            from outrider.client.local import certificates

            return certificates.run(args)
        case "keys":
            from outrider.client.commands import keys

            return keys.run(args)
        case "drafters":
            from outrider.client.commands import drafters

            return drafters.run(args)
        case _:
            from outrider.client.commands import models

            return models.run(args)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a subcommand. Flags on the command line override those in the file
    that `serve --config` names. Raises NotFoundError or InvalidRequestError if that file is missing
    or invalid."""
    args = make_parser().parse_args(arguments)
    if args.command != "serve" or args.config is None:
        return args
    from outrider.client.commands import flags_file, serve

    command, *given = arguments
    in_file = flags_file.read_flags(args.config, serve.add_arguments)
    return make_parser().parse_args([command, *in_file, *given])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from outrider.client.commands import drafters, generate, keys, models, serve, status
    from outrider.client.local import certificates

    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Serve a language model by speculative decoding in separate processes.",
    )
    parser.add_argument("--version", action="version", version=outrider.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, text in (
        ("serve", serve, "Run a router, verifiers and drafters on this machine."),
        ("generate", generate, "Generate answers to prompts."),
        ("status", status, "Show the state of a router and its fleet."),
        ("drafters", drafters, "Add drafters to a running router, or remove them."),
        ("certs", certificates, "Create a certificate authority and TLS certificates for a fleet."),
        ("keys", keys, "Create API keys."),
        ("models", models, "Download or list models."),
    ):
        module.add_arguments(
            commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        )
    commands.add_parser("config", help="Show, check and describe configurations.", add_help=False)
    commands.add_parser("train-head", help="Train a draft head for a model.", add_help=False)
    commands.add_parser("bench", help="Run a benchmark from a source checkout.", add_help=False)
    commands.add_parser(
        "ray", help="Run a fleet on a Ray cluster, show its state, or stop it.", add_help=False
    )
    commands.add_parser(
        "chaos", help="Inject faults into a local fleet and check their effects.", add_help=False
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
