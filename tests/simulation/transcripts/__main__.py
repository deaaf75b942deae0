from __future__ import annotations

import sys

from tests.simulation.transcripts import main

sys.exit(main())
