"""Guard of the dashboard: decides which requests may see the job, and which may act on it.

- A request of another site is refused: ``Sec-Fetch-Site`` and ``Origin`` name the site that caused it (CSRF).
- A request for another name is refused: a stranger's name that resolves to this machine makes a browser regard the
  dashboard as a part of the stranger's site (DNS rebinding). Addresses and this machine's own name are allowed.
- Seeing needs the job's token, unless the request comes over the loopback interface, and not through a proxy.
- Acting always needs the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass

from elasticstate.net.listening import own_name
from elasticstate.net.names import is_this_machine


@dataclass(frozen=True, slots=True)
class Visit:
    """The facts about a request on which the guard decides."""

    peer: str  # address of the peer
    host: str  # header Host
    scheme: str = "http"
    origin: str | None = None
    fetch_site: str | None = None  # header Sec-Fetch-Site
    is_forwarded: bool = False  # a proxy has added its headers
    authorization: str = ""


class Guard:
    """Guard of a job with this token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def refuse(self, visit: Visit) -> str:
        """Return why the request is refused, or "": it comes from another site, or is for another name."""
        if not _is_own_name(visit.host):
            return f"the host {visit.host!r} is not this machine. Open the dashboard by an address of this machine"
        if visit.fetch_site not in (None, "same-origin", "none"):
            return "the request comes from another site. Enter the dashboard's address yourself"
        if visit.origin not in (None, f"{visit.scheme}://{visit.host}"):
            return "the request comes from another site"
        return ""

    def has_token(self, visit: Visit) -> bool:
        return hmac.compare_digest(visit.authorization.encode(errors="replace"), self._expected)

    def may_see(self, visit: Visit) -> bool:
        return self.has_token(visit) or (is_loopback_address(visit.peer) and not visit.is_forwarded)


def is_loopback_address(text: str) -> bool:
    """Return True for an IPv4 or IPv6 address of the loopback interface."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_own_name(host: str) -> bool:
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.]+)]|(?P<name>[^:\[\]]+))(?::\d{1,5})?", host)
    if match is None:
        return False
    name = (match["six"] or match["name"]).lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return is_this_machine(name) or name in (own_name().lower(), own_name().lower().partition(".")[0])
    return True
