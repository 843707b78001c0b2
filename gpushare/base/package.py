"""The data files of the package, ``gpushare/data``."""

from __future__ import annotations

import functools
from typing import Any


def package_text(name: str) -> str:
    """Return the text of a data file."""
    from importlib.resources import files

    return files("gpushare").joinpath(f"data/{name}").read_text(encoding="utf-8")


@functools.cache
def package_rows(name: str) -> Any:
    """Return the content of a YAML file among the data files, parsed once."""
    import yaml

    return yaml.load(package_text(name), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe one
