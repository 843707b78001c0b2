"""``python -m gpushare``."""

from __future__ import annotations

import sys

from gpushare.cli import main

code = main()
# A Ctrl-C within exec(), which dataclasses use, lets Python end with SIGINT instead of this code, even if it was caught.
# The next exec() clears that (_PyRuntime.signals.unhandled_keyboard_interrupt, seen in CPython 3.11).
exec("")  # noqa: S102
sys.exit(code)
