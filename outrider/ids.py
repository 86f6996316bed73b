"""Identifier types of requests, sessions, drafters, verifiers and tenants (`NewType` of `str`).

Distinct types keep a session id from being passed where a drafter id is expected.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of a client's request, chosen by the client or made by the router. Unique within a router."""

SessionId = NewType("SessionId", str)
"""Id of a session, which is a request's state in a verifier. Unique for one run of the router
process."""

DrafterId = NewType("DrafterId", str)
"""Id of a drafter process, which keeps its id when it restarts."""

VerifierId = NewType("VerifierId", str)
"""Id of a verifier process, which keeps its id when it restarts."""

TenantId = NewType("TenantId", str)
"""Id of the tenant to which a request is charged; empty if the request names none."""
