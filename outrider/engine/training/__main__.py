"""Entry point `python -m outrider.engine.training`: the same command as `outrider train-head`.

It does not import the command line of `outrider.client`.
"""

from __future__ import annotations

import argparse
import logging
import sys

from outrider.engine.training.cli import add_arguments, main

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(
        prog="outrider train-head", description="Train, evaluate or check a draft head."
    )
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
