"""Which local address a rank advertises to the others.

By default the address that routes to the meeting point: the kernel's own answer, without a packet sent. Users override
it by interface name or CIDR block. On one machine it is loopback, which nobody else can reach; loopback is never
advertised to a rank on another machine. The choice is pure (`choose`); what the machine has is read in
`local_addresses`, `route_to` and `host_identity`.
"""

from __future__ import annotations

import ipaddress
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["Chosen", "LocalAddress", "choose", "host_identity", "is_loopback", "local_addresses", "route_to"]

# RFC 5737 documentation address: never assigned, so it follows the default route. No packet is sent to it.
_ANYWHERE = "192.0.2.1"


@dataclass(frozen=True)
class LocalAddress:
    """One address of one interface of this machine."""

    interface: str
    host: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"{self.interface} {self.host}"


@dataclass(frozen=True)
class Chosen:
    """The address to bind and advertise, its interface, and the reason for the log."""

    host: str
    interface: str
    reason: str


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_identity() -> str:
    """A text that is equal for two processes exactly if they share a loopback interface: machine and network namespace.

    Without /proc (not Linux) the machine is told by its name and hardware address.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/net").stat()
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode():x}"
    return f"{boot_id}/{namespace.st_dev:x}:{namespace.st_ino}"


def local_addresses() -> list[LocalAddress]:
    """The addresses of this machine, IPv4 first; link-local IPv6 is left out, as it means nothing without a zone."""
    import ifaddr

    found: list[LocalAddress] = []
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            host = entry.ip if isinstance(entry.ip, str) else entry.ip[0]
            if not ipaddress.ip_address(host).is_link_local:
                found.append(LocalAddress(adapter.name, host))
    return sorted(found, key=lambda address: ":" in address.host)


def route_to(host: str) -> str | None:
    """The local address from which packets to `host` would leave, or None if there is no route or no such name."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: sets the route, sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _matches(address: LocalAddress, entry: str) -> bool:
    if "/" in entry:
        network = ipaddress.ip_network(entry, strict=False)
        own = ipaddress.ip_address(address.host)
        return own.version == network.version and own in network
    return entry in (address.interface, address.host)


def _no_address(what: str, available: Sequence[LocalAddress]) -> ConfigError:
    listing = ", ".join(str(address) for address in available) or "none"
    return ConfigError(
        f"{what}; this machine has: {listing}. Set interface (PENSTOCK_INTERFACE) to a name or a CIDR block "
        "of the network that connects the ranks"
    )


def choose(
    interface: str | None, single_host: bool, routed: Sequence[str | None], available: Sequence[LocalAddress]
) -> Chosen:
    """Pick the address to advertise.

    Args:
        interface: The option: names, CIDR blocks or addresses separated by commas; ``!`` excludes.
        single_host: Whether every rank is on this machine.
        routed: What routes to the meeting point, and then other guesses, best first; ``None`` where there is no route.
        available: The addresses of this machine.

    Returns:
        The address, with the reason.

    Raises:
        ConfigError: Nothing fits, or only loopback does while another rank is on another machine.
    """
    entries = [entry.strip() for entry in interface.split(",")] if interface else []
    included = [entry for entry in entries if not entry.startswith("!")]
    excluded = [entry[1:].strip() for entry in entries if entry.startswith("!")]
    names = {address.host: address.interface for address in available}
    allowed = [address for address in available if not any(_matches(address, entry) for entry in excluded)]
    if included:
        wanted = [address for address in allowed if any(_matches(address, entry) for entry in included)]
        if not wanted:
            raise _no_address(f"no local address matches interface={interface!r}", available)
        wanted.sort(key=lambda address: address.host not in routed)  # stable: the routed one if it is among them
        best = next((address for address in wanted if single_host or not address.loopback), None)
        if best is None:
            raise _no_address(
                f"interface={interface!r} is loopback, but at least one rank is on another machine", available
            )
        return Chosen(best.host, best.interface, f"interface={interface}")
    # Not from the list: a network namespace may have its loopback interface down, and then binding says so clearly.
    loopback = LocalAddress(names.get("127.0.0.1", "lo"), "127.0.0.1")
    if single_host and not any(_matches(loopback, entry) for entry in excluded):
        return Chosen(loopback.host, loopback.interface, "all ranks are on this machine")
    remote = {address.host for address in allowed if not address.loopback}
    for host in routed:
        if host in remote:
            return Chosen(host, names[host], "routes to the meeting point")
    if len(remote) == 1:
        (host,) = remote
        return Chosen(host, names[host], "the only address that others can reach")
    if not remote:
        raise _no_address("there is no address but loopback, which cannot be used here", available)
    raise _no_address("it is not clear which address the other ranks can reach", available)


def choose_here(interface: str | None, single_host: bool, meeting_host: str | None) -> Chosen:
    """`choose` for this machine; `meeting_host` is the host where the ranks meet, if they meet at a host."""
    guesses = [meeting_host, _ANYWHERE] if meeting_host else [_ANYWHERE]
    return choose(interface, single_host, [route_to(host) for host in guesses], local_addresses())
