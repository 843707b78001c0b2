"""Reading a mig-parted file from the disk or stdin: bounded, and never more than data."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import BadUsage, GpushareError, NoPermission, NotFound
from gpushare.mig.parted import Config, Demand, PciIds, choose, for_change, idle_entries, parse_parted, wishes_for

if TYPE_CHECKING:
    from gpushare.host.host import Host
    from gpushare.model import Gpu

# Some hundred times what mig-parted itself ships.
_MAX_BYTES: Final = 256 << 10
# A merge key (<<) may double a mapping at each level; no honest one comes near.
_MAX_KEYS: Final = 4096
_MAX_DIGITS: Final = 40
_HINT: Final = "write one as you need it from what is there: gpushare mig export > mig.yaml"


def demands_of_file(path: str, config_name: str | None, gpus: Sequence[Gpu], host: Host) -> dict[int, Demand]:
    """Return what a file wants of these GPUs: `config_of`, then `demands_of`; errors as theirs.

    Who plans twice calls those two: stdin can be read only once, and a file may change meanwhile.
    """
    return demands_of(config_of(path, config_name), gpus, host)


def config_of(path: str, name: str | None) -> Config:
    """Return a configuration of a mig-parted v1 file; ``-`` is stdin, and a file with only one needs no name.

    Raises:
        BadUsage: no such file format, or several configurations and none is named.
        NotFound: no such file or configuration.
        NoPermission: the file cannot be read.
    """
    documents = _documents(_text(path), "stdin" if path == "-" else path)
    if len(documents) > 2:
        raise BadUsage(f"{path}: {len(documents)} YAML documents", "give one mig-parted file", code="bad_file")
    return choose(parse_parted(*documents), name)


def demands_of(config: Config, gpus: Sequence[Gpu], host: Host) -> dict[int, Demand]:
    """Return what a configuration wants of these GPUs, by index, for a change: GPUs without MIG are skipped.

    GPUs that no entry is for are left out.

    Raises:
        BadUsage: a count too large, or placements that are not those of the same devices.
        NotFound: no entry is for any of these GPUs.
        NotSupported: MIG is turned on by index on a GPU that has none.
    """
    ids = pci_ids(config, gpus, host)
    demands = for_change(wishes_for(config, gpus, ids), gpus)
    if not demands:
        why = "; ".join(idle_entries(config, gpus, ids)) or "none of them has MIG"
        raise NotFound(
            f"config '{config.name}' asks nothing of the chosen GPUs: {why}", "see: gpushare mig status", code="no_gpu"
        )
    return demands


def pci_ids(config: Config, gpus: Sequence[Gpu], host: Host) -> dict[int, PciIds]:
    """Return the PCI ids of the GPUs, if the configuration looks at them; unknown for one that does not answer."""
    found = {}
    if any(entry.filters for entry in config.entries):
        for gpu in gpus:
            with contextlib.suppress(GpushareError):
                found[gpu.index] = PciIds(*host.nvml.pci_ids(gpu.index))
    return found


def _text(path: str) -> str:
    shown = "stdin" if path == "-" else path
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {shown}", _HINT, code="no_file") from None
    except IsADirectoryError:
        raise BadUsage(f"{shown} is a directory", "give a mig-parted file", code="bad_file") from None
    except PermissionError:
        raise NoPermission(f"{shown} cannot be read", "read it as its owner, or as root", code="bad_file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadUsage(f"{shown} cannot be read: {reason}", "give a mig-parted file", code="bad_file") from None
    if len(data) > _MAX_BYTES:
        raise BadUsage(f"{shown} is larger than 256 KiB", "give a mig-parted file", code="bad_file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadUsage(f"{shown} is not UTF-8 text", "give a mig-parted file", code="bad_file") from None


def _documents(text: str, shown: str) -> list[Any]:
    import yaml

    try:
        return list(yaml.load_all(text, _loader())) or [None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        where = "" if mark is None else f", line {mark.line + 1}"
        raise BadUsage(f"{shown} is not YAML{where}: {problem}", _HINT, code="bad_file") from None
    except RecursionError:
        raise BadUsage(f"{shown} is nested too deep", _HINT, code="bad_file") from None
    except ValueError as error:
        raise BadUsage(f"{shown} has a value that YAML cannot have: {error}", _HINT, code="bad_file") from None


class Located(dict[Any, Any]):
    """A mapping that knows the line it begins in."""

    line: int | None = None


def _loader() -> Any:
    """Return PyYAML's safe loader, with lines, and without duplicate keys and endless values."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MAX_KEYS:
                raise yaml.constructor.ConstructorError(None, None, "too many keys", node.start_mark)

        def mapping(self, node: Any) -> Any:
            found = Located()
            found.line = node.start_mark.line + 1
            yield found
            written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            twice = next((key for key, number in Counter(written).items() if number > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{twice[:40]}' stands twice", node.start_mark
                )
            found.update(self.construct_mapping(node))

        def number(self, node: Any) -> Any:
            if len(node.value) > _MAX_DIGITS:
                raise yaml.constructor.ConstructorError(None, None, "the number is too long", node.start_mark)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.mapping)
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.number)
    return Loader
