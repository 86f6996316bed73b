"""DNS names among the peer addresses, and the addresses that they have resolved to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.errors import InvalidRequestError

SCHEME = "dns:///"


def split_addresses(
    addresses: Iterable[str],
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Return the plain addresses, and the (host, port) pair of each address that is a DNS name,
    `dns:///HOST:PORT`. Raises InvalidRequestError for a malformed name.
    """
    plain, names = [], []
    for address in addresses:
        if not address.startswith(SCHEME):
            plain.append(address)
            continue
        host, _, port = address.removeprefix(SCHEME).rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequestError(
                f"{address!r} must be dns:///HOST:PORT", reason="INVALID_ADDRESS"
            )
        names.append((host, int(port)))
    return tuple(plain), tuple(names)


@dataclass(slots=True)
class ResolvedName:
    """Addresses to which a DNS name has resolved."""

    addresses: frozenset[str] = frozenset()
    """Addresses (HOST:PORT) of the last DNS answer."""
    removed_addresses: set[str] = field(default_factory=set)
    """Addresses of earlier DNS answers that are missing from the last one and whose peers were not
    removed yet.
    """

    def update_addresses(self, addresses: frozenset[str]) -> frozenset[str]:
        """Record a DNS answer and return its addresses that the previous answer did not have.

        An address that both answers have is not returned again, because an operator may have
        removed its peer meanwhile.
        """
        joined = addresses - self.addresses
        self.removed_addresses |= self.addresses - addresses
        self.removed_addresses -= addresses
        self.addresses = addresses
        return joined
