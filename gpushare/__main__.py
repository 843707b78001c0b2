"""``python -m gpushare``."""

from __future__ import annotations

import sys

from gpushare.cli import main

sys.exit(main())
