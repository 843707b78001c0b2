"""``gpushare mig check``, and the mig-parted files of ``mig apply`` and ``mig check``."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpushare.base.errors import BadUsage, ExitCode, GpushareError, NoGpu, no_gpu_error
from gpushare.base.model import Gpu
from gpushare.base.selection import no_mig_error
from gpushare.base.units import parse_memory_limit
from gpushare.base.values import dataclass
from gpushare.cli.options import (
    GPU_OPTION,
    PARTED_CONFIG,
    PARTED_EXACT,
    PARTED_FILE,
    Refused,
    argument,
    gpus_named,
    refuse,
    settings,
)
from gpushare.host.host import Host
from gpushare.inputs import documents, shown_path, text_of
from gpushare.mig.driver import MigReader
from gpushare.mig.parted import (
    HINT,
    Config,
    Demand,
    PciIds,
    choose_config,
    demands_for_change,
    demands_in,
    parse_parted,
    unmatched_entry_notes,
)
from gpushare.mig.target import DeviceCount, Difference, difference
from gpushare.mig.wish import Need, Request, Wish, parse_wish
from gpushare.show.result import Result


def check(
    wish: list[str] | None = argument("WISH...", "The instances expected: 3g.40gb '1g.10gb*2'; from slice 4 on: 3g:4."),
    gpu: str | None = GPU_OPTION,
    file: str | None = PARTED_FILE,
    config: str | None = PARTED_CONFIG,
    exact: bool = PARTED_EXACT,
) -> Any:
    """Check whether each chosen GPU has exactly these MIG devices; show what is missing or extra.

    It compares profiles, counts, MIG mode and pending mode; placements only if given (3g.40gb:4). With a file, each GPU
    must match its entry; a GPU without one is skipped, unless -g names it. With --exact such a GPU is an error, as with
    nvidia-mig-parted assert. Exit code 0: all match; 7: not. Needs no root.
    """
    if bool(wish) == (file is not None):
        raise BadUsage(
            "either a WISH or a file is needed",
            "for example: 2g '1g*2'; or -f mig.yaml -c NAME",
            code="no_wish",
        )
    refuse(OF_FILE)
    parted_config = None if file is None else read_config(file, config)
    host = settings.connect()
    gpus = gpus_named(host, gpu)
    if not gpus:
        raise no_gpu_error()
    needs_entry = exact or gpu is not None
    notes: tuple[str, ...] = ()
    if parted_config is None:
        demand = Demand(mig_enabled=True, wish=parse_wish(" ".join(wish or ())))
        demands: Mapping[int, Demand] = {each.index: demand for each in gpus}
        config_name = None
    else:
        ids = _pci_ids(parted_config, host)
        notes = _entry_notes(parted_config, host, ids)
        demands = demands_in(parted_config, gpus, ids)
        config_name = parted_config.name
    checked = tuple(_checked_gpu(each, demands.get(each.index), host, needs_entry=needs_entry) for each in gpus)
    # With --exact an entry without a GPU, which has a note, is a difference too.
    as_requested = all(each.as_requested is not False for each in checked) and not (exact and notes)
    if not as_requested:
        notes = (*notes, "see the plan to get there: gpushare mig apply --dry-run, with the same arguments")
    return Result(
        data=MigCheckAnswer(as_requested=as_requested, config=config_name, gpus=checked),
        text="\n".join(line for each in checked for line in each.lines),
        notes=notes,
        exit_code=ExitCode.OK if as_requested else ExitCode.NOT_AS_REQUESTED,
    )


@dataclass(frozen=True, kw_only=True)
class CheckedGpu:
    """One GPU compared with what was asked. ``as_requested`` is null if the configuration has no entry for it."""

    gpu: int
    as_requested: bool | None
    problem: str | None
    missing: tuple[DeviceCount, ...]
    extra: tuple[DeviceCount, ...]

    @property
    def lines(self) -> list[str]:
        if self.as_requested is None:
            return [f"GPU {self.gpu}: {self.problem}"]
        if self.as_requested:
            return [f"GPU {self.gpu}: as asked"]
        lines = [f"GPU {self.gpu}: not as asked"]
        if self.problem:
            lines.append(f"  {self.problem}")
        for title, devices in (("missing", self.missing), ("extra", self.extra)):
            if devices:
                lines.append(f"  {title}: {', '.join(map(str, devices))}")
        return lines


@dataclass(frozen=True, kw_only=True)
class MigCheckAnswer:
    """The answer of `mig check`."""

    as_requested: bool
    config: str | None
    gpus: tuple[CheckedGpu, ...]


def _checked_gpu(gpu: Gpu, demand: Demand | None, host: Host, *, needs_entry: bool) -> CheckedGpu:
    """Return a GPU compared with its demand; one without a demand is left out of the verdict, unless it ``needs_entry``."""
    problem, mismatch = _compare_gpu(gpu, demand, host)
    is_left_out = demand is None and gpu.error is None and not needs_entry
    return CheckedGpu(
        gpu=gpu.index,
        as_requested=None if is_left_out else problem is None and not mismatch,
        problem=problem,
        missing=mismatch.missing,
        extra=mismatch.extra,
    )


def _compare_gpu(gpu: Gpu, demand: Demand | None, host: Host) -> tuple[str | None, Difference]:
    """Return what is wrong with a GPU as a whole, if anything, and how its MIG devices differ, where they can be compared."""
    if gpu.error is not None:
        return gpu.error, Difference()
    if demand is None:
        return "no entry of the config is for it", Difference()
    if gpu.mig_capable is None:
        return "the driver does not report its MIG mode", Difference()
    if not gpu.mig_capable:
        problem = f"{gpu.name or 'this GPU'} has no MIG" if demand.mig_enabled else None
        return problem, Difference()
    as_asked = gpu.mig_enabled is demand.mig_enabled and gpu.mig_pending in {None, demand.mig_enabled}
    problem = None if as_asked else f"MIG is {mode_text(gpu)}; asked: {'on' if demand.mig_enabled else 'off'}"
    layout = MigReader(host.nvml).layout(gpu)
    if demand.wish and not layout.profiles:
        # Up to driver 575 there are no profiles while MIG is off; then the mode is the problem.
        return problem or "the driver lists no MIG profiles", Difference()
    return problem, difference(layout, demand.wish)


def mode_text(gpu: Gpu) -> str:
    """Return the MIG mode of a GPU in words: ``on``, ``off``, ``on, pending: off``."""
    mode = "on" if gpu.mig_enabled else "off"
    if gpu.mig_pending is None or gpu.mig_pending == gpu.mig_enabled:
        return mode
    return f"{mode}, pending: {'on' if gpu.mig_pending else 'off'}"


def read_config(path: str, name: str | None) -> Config:
    """Return a configuration of a mig-parted v1 file; ``-`` is stdin, and a file with only one needs no name.

    A second document has the placements that gpushare exports beside it.
    """
    start = f"start with the current layout: gpushare export mig-parted > {shlex.quote(path)}"
    yaml_documents = documents(text_of(path, "mig-parted", start), shown_path(path), HINT)
    if len(yaml_documents) > 2:
        raise BadUsage(f"{path}: {len(yaml_documents)} YAML documents", "give one mig-parted file", code="bad_file")
    placements = yaml_documents[1] if len(yaml_documents) == 2 else None
    return choose_config(parse_parted(yaml_documents[0], placements, shown_path(path)), name)


OF_FILE: Final = (
    Refused("--exact", "--file", "a layout in words is always exact", "-f mig.yaml --exact", needs=True),
    Refused("--config", "--file", "it names a config of the file", "-f mig.yaml -c NAME", needs=True),
)


def demands_of(
    config: Config, gpus: Sequence[Gpu], host: Host, *, named: bool, exact: bool
) -> tuple[dict[int, Demand], tuple[str, ...]]:
    """Return what a change should give these GPUs, by index, and notes on entries and GPUs that do not match.

    GPUs without an entry are left out, as by mig-parted, or without MIG.

    It is an error if none of the GPUs that the user has ``named`` remains, and with ``exact`` if a GPU has no entry or
    an entry no GPU.
    """
    ids = _pci_ids(config, host)
    notes = _entry_notes(config, host, ids)
    wishes = demands_in(config, gpus, ids)
    demands = demands_for_change(wishes, gpus)
    without_entry = [str(gpu.index) for gpu in gpus if gpu.index not in wishes]
    if exact and (without_entry or notes):
        missing = [f"config '{config.name}' has no entry for GPU {', '.join(without_entry)}"] if without_entry else []
        raise NoGpu("; ".join([*missing, *notes]), "change the file, or drop --exact", code="no_gpu_of_config")
    if demands:
        return demands, notes
    if any(wish.mig_enabled for wish in wishes.values()):
        raise no_mig_error(gpus)
    if named:
        reasons = "; ".join(notes) or "none of them has MIG"
        raise NoGpu(f"config '{config.name}' has no entry for the chosen GPUs: {reasons}", "see: gpushare mig status")
    return {}, (*notes, f"config '{config.name}' has no entry for a GPU with MIG here")


def _entry_notes(config: Config, host: Host, ids: Mapping[int, PciIds]) -> tuple[str, ...]:
    """Return the notes on entries without a GPU of this host. Raises NoGpu if all entries name only other GPUs."""
    gpus = host.nvml.identities()
    notes = unmatched_entry_notes(config, gpus, ids)
    if all(entry.devices and not {gpu.index for gpu in gpus} & set(entry.devices) for entry in config.entries):
        raise NoGpu(
            f"config '{config.name}' matches no GPU of this host: {'; '.join(notes)}",
            "see which are here: gpushare status",
        )
    return notes


def _pci_ids(config: Config, host: Host) -> dict[int, PciIds]:
    """Return the PCI ids of all GPUs, if the configuration uses them; none for one that does not answer."""
    ids = {}
    if any(entry.filters for entry in config.entries):
        for gpu in host.nvml.identities():
            with contextlib.suppress(GpushareError):
                ids[gpu.index] = PciIds(*host.nvml.pci_ids(gpu.index))
    return ids


def typed_wish(words: Sequence[str] | None, memory: str | None, sm: int | None) -> Wish:
    """Return the instances that are wanted: by profile in words, or one by the memory and SMs that it needs."""
    by_need = memory is not None or sm is not None
    if bool(words) == by_need:
        raise BadUsage(
            "give either a WISH, or --memory, --sm or both",
            "for example: 2g '1g*2'; or --memory 20G --sm 30",
            code="no_wish",
        )
    if words:
        return parse_wish(" ".join(words))
    need = Need(memory_bytes=None if memory is None else parse_memory_limit(memory), multiprocessors=sm)
    return (Request(profile=need),)
