#!/usr/bin/env python3
"""Check for an announced preemption or stop of this Compute Engine VM. A command for elasticrun --preemption-command.

Exits with 0 and prints the reason if the VM is about to be preempted or stopped, with 1 if not, and with 2 if the
metadata server does not answer as documented:
https://cloud.google.com/compute/docs/instances/create-use-spot (instance/preempted: TRUE or FALSE; 30 s are left then)
and https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice (instance/maintenance-event: NONE,
MIGRATE_ON_HOST_MAINTENANCE, which the VM survives, or TERMINATE_ON_HOST_MAINTENANCE).
"""

from __future__ import annotations

import os
import sys
from http.client import HTTPException
from urllib.request import ProxyHandler, Request, build_opener

SERVICE = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"
TIMEOUT_S = 2.0  # for each of the two requests


def ask(key: str, *known: str) -> str:
    """Return the value of a metadata key. Raises ValueError if the value is not one of ``known``."""
    request = Request(f"{SERVICE}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"})
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
        value = str(answer.read(65536).decode().strip())
    if value not in known:
        raise ValueError(f"instance/{key} is {value[:80]!r}")
    return value


def notice() -> str:
    """Return the announced event of this VM; "" if nothing is announced."""
    if ask("preempted", "TRUE", "FALSE") == "TRUE":
        return "the VM is being preempted"
    stop = "TERMINATE_ON_HOST_MAINTENANCE"
    if ask("maintenance-event", "NONE", "MIGRATE_ON_HOST_MAINTENANCE", stop) == stop:
        return "the VM will be stopped for the maintenance of its host"
    return ""


def main() -> int:
    try:
        reason = notice()
    except (OSError, HTTPException, ValueError) as error:
        print(f"the metadata server at {SERVICE} does not answer as expected: {error!r}", file=sys.stderr)
        return 2
    if reason:
        print(reason)
    return 0 if reason else 1


if __name__ == "__main__":
    sys.exit(main())
