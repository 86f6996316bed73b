"""What Outrider's processes do to themselves: their event loop, their interpreter, their end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms is longer than a draft step, or a round outside its forward, may take: a thread
that waits for the interpreter lock would stall the others by that much."""


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run` on uvloop where it is installed: a gRPC round trip takes a tenth less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a process's `tls` table."""
    add = parser.add_argument_group("certificates").add_argument
    add("--tls-cert", metavar="FILE.pem", dest="tls.cert", help="certificate; its name is a role")
    add("--tls-key", metavar="FILE.pem", dest="tls.key", help="private key of it")
    add("--tls-ca", metavar="FILE.pem", dest="tls.ca", help="authority of the other processes")


def tune_interpreter() -> None:
    """Settings for a process that does nothing but serve; call it once the models are loaded."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The models stay for the life of the process: keep the collector from walking over them.
    gc.collect()
    gc.freeze()
