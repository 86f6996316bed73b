"""Hook that makes a process report another version, as during an upgrade of a fleet.

--hook tests.fakes.other_version:version=9.1.0,protocol=3
"""

from __future__ import annotations

import sys

import outrider
from outrider.wire.messages import PROTOCOL_VERSION


def install(hooks: object, *, version: str, protocol: int = PROTOCOL_VERSION) -> None:
    """Report this version of the package, and speak this version of the protocol."""
    outrider.__version__ = version
    for name, module in tuple(sys.modules.items()):
        if name.startswith("outrider") and hasattr(module, "PROTOCOL_VERSION"):
            vars(module)["PROTOCOL_VERSION"] = protocol
