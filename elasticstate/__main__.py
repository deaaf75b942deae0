"""``python -m elasticstate``: the same as ``elasticrun``."""

from __future__ import annotations

import sys

from elasticstate.cli import main

sys.exit(main())
