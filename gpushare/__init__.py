"""gpushare: share the GPUs of one host well.

For scripts and notebooks (docs/python.md)::

    import gpushare

    with gpushare.start(["python3", "train.py"], memory="20G", wait=True) as job:
        exit_code = job.wait()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpushare.base.errors import (
        BadUsage,
        DriverNotLoaded,
        GpushareError,
        InUse,
        NeedsConsent,
        NoPermission,
        NotFound,
        NotSupported,
        NvmlMissing,
        OperationFailed,
        TimedOut,
    )
    from gpushare.run.python import Job, job, start, status

# A literal: importlib.metadata would cost 12 ms at every start.
__version__ = "0.1.0"
__all__ = [
    "BadUsage",
    "DriverNotLoaded",
    "GpushareError",
    "InUse",
    "Job",
    "NeedsConsent",
    "NoPermission",
    "NotFound",
    "NotSupported",
    "NvmlMissing",
    "OperationFailed",
    "TimedOut",
    "__version__",
    "job",
    "start",
    "status",
]


def __getattr__(name: str) -> Any:
    """Load what is public on its first use: every start of the program imports this module."""
    if name not in __all__:
        raise AttributeError(f"module 'gpushare' has no attribute {name!r}")
    from importlib import import_module

    home = "gpushare.run.python" if name in {"Job", "job", "start", "status"} else "gpushare.base.errors"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
