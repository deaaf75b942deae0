#!/bin/sh
# A host discovery script: prints a host, or host:slots, per line; blank lines and # comments are skipped.
#
#   HOSTS_FILE=hosts elasticrun -np 4 --min-np 2 --host-discovery-script examples/discover.sh python examples/digits.py
#
# Edit the file while the job runs, and hosts come and go. A real script would ask the cluster's scheduler. It must exit
# with a non-zero status when it does not know: the last valid answer is used then.
exec cat "${HOSTS_FILE:?names the file with the hosts}"
