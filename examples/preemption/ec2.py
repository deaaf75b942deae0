#!/usr/bin/env python3
"""Check for an interruption notice of this EC2 spot instance. A command for elasticrun --preemption-command.

Exits with 0 and prints the reason if AWS has announced an interruption, with 1 if not, and with 2 if the metadata
service does not answer as documented:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
(first a token; then instance-action: 404 while there is no notice. A notice comes two minutes before the interruption.)
"""

from __future__ import annotations

import json
import os
import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

SERVICE = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
TIMEOUT_S = 2.0  # for each of the two requests


def call(path: str, method: str, header: str, value: str) -> str:
    request = Request(f"{SERVICE}/latest/{path}", method=method, headers={header: value})
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read(65536).decode())


def notice() -> str:
    """Return the announced action and its time; "" if nothing is announced."""
    token = call("api/token", "PUT", "X-aws-ec2-metadata-token-ttl-seconds", "60")
    try:
        action = json.loads(call("meta-data/spot/instance-action", "GET", "X-aws-ec2-metadata-token", token))
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise
    return f"spot instance: {action['action']} at {action['time']}"


def main() -> int:
    try:
        reason = notice()
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        print(f"the metadata service at {SERVICE} does not answer as expected: {error!r}", file=sys.stderr)
        return 2
    if reason:
        print(reason)
    return 0 if reason else 1


if __name__ == "__main__":
    sys.exit(main())
