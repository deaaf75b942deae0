from __future__ import annotations

import sys

from tests.kit.transcripts import main

sys.exit(main())
