#!/usr/bin/env python3
"""Whether this Compute Engine VM is about to be preempted or stopped: for elasticrun --preemption-command.

Exits with 0 and says why if it is, with 1 if it is not, with 2 if the metadata server does not answer as documented:
https://cloud.google.com/compute/docs/instances/create-use-spot (instance/preempted: TRUE or FALSE; 30 s are left then)
and https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice (instance/maintenance-event: NONE,
MIGRATE_ON_HOST_MAINTENANCE, through which the VM goes on, or TERMINATE_ON_HOST_MAINTENANCE).
"""

from __future__ import annotations

import os
import sys
from http.client import HTTPException
from urllib.request import ProxyHandler, Request, build_opener

SERVICE = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"
TIMEOUT_S = 2.0  # for each of the two calls


def ask(key: str, *known: str) -> str:
    """The value of a key, which has to be one of those that are ``known``."""
    request = Request(f"{SERVICE}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"})
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
        value = str(answer.read(65536).decode().strip())
    if value not in known:
        raise ValueError(f"instance/{key} is {value[:80]!r}")
    return value


def notice() -> str:
    """What will be done to this VM; "" if nothing is known."""
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
