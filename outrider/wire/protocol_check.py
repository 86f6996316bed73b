"""Check of the protocol version that a peer reports in a handshake. Pure."""

from __future__ import annotations

import outrider
from outrider.errors import FailedPreconditionError
from outrider.wire.messages import PROTOCOL_VERSION


def check_protocol(peer: str, *, protocol_version: int, version: str) -> None:
    """Raise FailedPreconditionError (PROTOCOL_MISMATCH) unless a peer speaks the protocol of this
    process. The versions of the packages may differ.

    `peer` names the peer in the message, for example `verifier v0`. `protocol_version` and
    `version`, the version of its package, are what the peer reported; `version` is "" from 0.1.
    """
    if protocol_version == PROTOCOL_VERSION:
        return
    package = f"version {version}" if version else "of unknown version (0.1 does not report it)"
    raise FailedPreconditionError(
        f"{peer} is {package} and speaks protocol {protocol_version}; this process is version "
        f"{outrider.__version__} and speaks protocol {PROTOCOL_VERSION}. All processes of a fleet "
        "must speak the same protocol: start the new version as a second fleet "
        "(docs/operations.md, Upgrades)",
        reason="PROTOCOL_MISMATCH",
    )
