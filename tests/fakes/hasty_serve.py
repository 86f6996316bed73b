"""`outrider serve` whose processes get hardly any time to stop once they are closed."""

from __future__ import annotations

import sys

from outrider.client.commands import main
from outrider.client.local import child_process

if __name__ == "__main__":
    child_process.STOP_TIMEOUT_S = 0.3  # type: ignore[misc]
    sys.exit(main.main(["serve", *sys.argv[1:]]))
