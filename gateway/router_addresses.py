"""Where routers are: the names that the gateway was given, looked up anew whenever one is wanted.

A name may have many addresses, of IPv4 and IPv6, and others every time: a headless Service, a
router that came back elsewhere.
"""

import asyncio
import ipaddress
import random
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

_LOOKUP_S = 1.0  # then the addresses of last time must do
_MAX_ADDRESSES = 64  # of one name

logger = structlog.stdlib.get_logger("paceline.gateway")


@dataclass(frozen=True, slots=True)
class Address:
    endpoint: str  # host:port, as it was given
    target: str  # of gRPC: one address, never a name


class RouterAddresses:
    """`is_spread`: names are tried in an order by lot, not as they were given."""

    def __init__(self, endpoints: Sequence[str], *, is_spread: bool = False) -> None:
        self._is_spread = is_spread
        self._last = {endpoint: list[Address]() for endpoint in endpoints}

    async def look_up(self, avoided: Collection[Address]) -> list[Address]:
        """In the order in which to try them: those of one name by lot, so that gateways spread over
        them; `avoided` ones last."""
        await asyncio.gather(*map(self._renew, self._last))
        names = list(self._last.values())
        if self._is_spread:
            random.shuffle(names)
        found = [one for addresses in names for one in random.sample(addresses, len(addresses))]
        return sorted(dict.fromkeys(found), key=lambda address: address in avoided)

    async def _renew(self, endpoint: str) -> None:
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = await addresses_of(endpoint)
        except (OSError, UnicodeError, TimeoutError) as error:
            why = str(error) or "the name service does not answer"
            logger.info("router not found", router=endpoint, why=why)
        else:
            self._last[endpoint] = [Address(endpoint, target) for target in found]


async def addresses_of(endpoint: str) -> list[str]:
    """Targets of gRPC. Raises OSError, UnicodeError."""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return [_target(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
    targets = dict.fromkeys(_target(str(address[0]), port) for *_, address in found)
    return list(targets)[:_MAX_ADDRESSES]


def _target(address: str, port: str) -> str:
    return f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}"
