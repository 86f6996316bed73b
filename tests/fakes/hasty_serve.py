"""`outrider serve` whose processes get hardly any time to stop once they are closed."""

from __future__ import annotations

import sys

from outrider.client import cli, processes

if __name__ == "__main__":
    processes.STOP_S = 0.3  # type: ignore[misc]
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
