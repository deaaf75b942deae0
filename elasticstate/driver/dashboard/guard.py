"""Guard of the dashboard: decides which requests may see the job, and which may act on it.

- A request of another site is refused: ``Sec-Fetch-Site`` and ``Origin`` name the site that caused it (CSRF).
- A request for another name is refused: a stranger's name that resolves to this machine makes a browser regard the
  dashboard as a part of the stranger's site (DNS rebinding). Addresses and this machine's own name are allowed.
- Seeing needs the job's token, unless the request comes over the loopback interface, and not through a proxy. A proxy
  may leave no sign in a request: with ``--dashboard-require-token``, seeing always needs the token.
- Acting always needs the token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from elasticstate.net.names import is_own_host

_OF_PROXIES = {"cdn-loop", "forwarded", "true-client-ip", "via", "x-client-ip", "x-cluster-client-ip", "x-real-ip"}
_OF_PROXIES |= {"x-amzn-trace-id", "x-cloud-trace-context", "x-proxyuser-ip", "x-request-id", "x-scheme"}
_BEGINNINGS = ("cf-", "proxy-", "tailscale-", "x-arr-", "x-azure-", "x-envoy-", "x-forwarded", "x-original", "x-proxy-")


@dataclass(frozen=True, slots=True)
class Visit:
    """The facts about a request on which the guard decides."""

    peer: str  # address of the peer
    host: str  # header Host
    scheme: str = "http"
    origin: str | None = None
    fetch_site: str | None = None  # header Sec-Fetch-Site
    is_forwarded: bool = False  # by a proxy
    authorization: str = ""


class Guard:
    """Guard of a job with this token."""

    def __init__(self, token: str, requires_token: bool) -> None:
        """``requires_token``: also over the loopback interface."""
        self._expected = f"Bearer {token}".encode()
        self._requires_token = requires_token

    def refuse(self, visit: Visit) -> str:
        """Return why the request is refused, or "": it comes from another site, or is for another name."""
        if not is_own_host(visit.host):
            return f"the host {visit.host!r} is not this machine. Open the dashboard by an address of this machine"
        if visit.fetch_site not in (None, "same-origin", "none"):
            return "the request comes from another site. Enter the dashboard's address yourself"
        if visit.origin not in (None, f"{visit.scheme}://{visit.host}"):
            return "the request comes from another site"
        return ""

    def has_token(self, visit: Visit) -> bool:
        return hmac.compare_digest(visit.authorization.encode(errors="replace"), self._expected)

    def may_see(self, visit: Visit) -> bool:
        is_near = is_loopback_address(visit.peer) and not visit.is_forwarded
        return self.has_token(visit) or (is_near and not self._requires_token)


def is_from_proxy(headers: Iterable[str], version: tuple[int, int]) -> bool:
    """Return True if a request with these names of headers, and this version of HTTP, has signs of a proxy.

    Browsers and curl send HTTP/1.1. nginx sends 1.0 unless it is told otherwise, and then no header of its own.
    """
    names = [name.lower() for name in headers]
    return version < (1, 1) or any(name in _OF_PROXIES or name.startswith(_BEGINNINGS) for name in names)


def is_loopback_address(text: str) -> bool:
    """Return True for an IPv4 or IPv6 address of the loopback interface."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
