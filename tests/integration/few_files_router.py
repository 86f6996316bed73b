"""A router that may open few files, as under the limits of many containers."""

from __future__ import annotations

import resource
import sys

from outrider_router.__main__ import main

MAX_FILES = 512

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    sys.exit(main())
