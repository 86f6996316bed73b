"""Identifier types of requests, sessions, drafters, verifiers and tenants (`NewType` of `str`).

Distinct types keep a session id from being passed where a drafter id is expected.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
"""A client's request, chosen by the client or made by the router; unique per router."""

SessionId = NewType("SessionId", str)
"""A request being served by a verifier; unique per router incarnation."""

DrafterId = NewType("DrafterId", str)
"""A drafter process; stable across its restarts."""

VerifierId = NewType("VerifierId", str)
"""A verifier process; stable across its restarts."""

TenantId = NewType("TenantId", str)
"""Tenant to which a request is charged; empty if the request names none."""
