"""The checks of `gpushare doctor` on the driver, the host and the environment of programs, and the run of all checks."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar

from gpushare.base.errors import (
    BadUsage,
    DriverNotLoaded,
    GpushareError,
    NvmlMissing,
    OperationFailed,
    cut,
    or_none,
    system_error,
)
from gpushare.base.model import MUCH_UNLISTED, ComputeMode, Gpu, TimeSlice, Way, device_key
from gpushare.base.typed import DEVICE_UUID
from gpushare.base.units import counted, format_bytes, format_duration
from gpushare.doctor.check import (
    MOST_SHOWN,
    Check,
    Examination,
    Verdict,
    finding,
    for_owner,
    process_title,
    remedy_of,
    whom_to_ask,
)
from gpushare.doctor.mig import MIG_CHECKS
from gpushare.doctor.mps import USE_CHECKS, mps_daemons, mps_programs
from gpushare.host.capabilities import user_name
from gpushare.host.host import Host, ending_hint, make_private_directory
from gpushare.host.identity import uptime
from gpushare.host.open_files import OpenFiles
from gpushare.host.smi import PROGRAM as NVIDIA_SMI
from gpushare.host.store import OtherNamespace, RecordStore, Unread
from gpushare.host.users import command_as_user
from gpushare.hostfile.diff import diff_points
from gpushare.hostfile.load import applied_path, kept_entries, kept_file
from gpushare.hostfile.look import live_gpus
from gpushare.memory.ledger import owners_of, reservations
from gpushare.memory.peaks import PROFILES
from gpushare.memory.swapped import BACK, LEAVING, LOST, RETURNING, SWAPS, swaps
from gpushare.mig.daemons import devices_of
from gpushare.mig.ledger import MADE, NAMES, names_of
from gpushare.mig.places import places_on
from gpushare.mps.daemons import find_daemons
from gpushare.mps.home import DAEMONS, home_of, homes_in
from gpushare.pause.record import PAUSES, paused_jobs, paused_processes
from gpushare.run.jobs import JOBS
from gpushare.run.results import BENCHED, TUNED
from gpushare.snapshot import BLIND, HostState
from gpushare.timeslice.keep import KEEPS, keep_record
from gpushare.timeslice.policy import LENT, MODES, level_before_killed
from gpushare.timeslice.rules import KEEP_UNIT
from gpushare.timeslice.slices import RECORDS, slice_records

# NVIDIA's Xid catalogue: these need a reset of the GPU (RESET_GPU, RESTART_BM), or a replacement.
BAD_XIDS: Final = frozenset({46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158})


def persistence(seen: Examination) -> Iterator[Check]:
    """Check that persistence mode is on."""
    modes = {gpu.index: seen.host.nvml.persistence(gpu.index) for gpu in seen.answering}
    off = [index for index, on in modes.items() if on is False]
    for index in off:
        yield finding("gpu.persistence", index)
    if any(on is None for on in modes.values()):
        yield Check.skipped("gpu.persistence", seen="the driver does not report the persistence mode")
    elif modes and not off:
        yield Check.passed("gpu.persistence", seen="persistence mode is on")


def power(seen: Examination) -> Iterator[Check]:
    """Check that no power cap slows a GPU down."""
    for gpu in seen.answering:
        nvml = seen.host.nvml
        usual = nvml.usual_power_limit_watts(gpu.index)
        limit = nvml.with_power(gpu).power_limit_watts
        # A difference of a watt slows nothing down.
        if usual is not None and limit is not None and limit < usual - 1:
            yield finding("gpu.power_cap", gpu.index, limit=limit, usual=usual)


def compute_mode(seen: Examination) -> Iterator[Check]:
    """Check that no compute mode is left over from an MPS daemon that is gone. One set by `apply` is not left over."""
    if seen.daemons_error is not None:
        return
    served_by_gpushare = {
        item.record.device_uuid for item in seen.daemons if item.record is not None and item.daemon.error is None
    }
    # Another user may claim any GPU: the driver must show the daemon there.
    served_by_others = {
        index
        for item in seen.daemons
        for index in item.daemon.gpu_indexes
        if not item.daemon.ours and item.serves(seen.host, index)
    }
    exclusive = {index for index, entry in seen.wanted.items() if entry.sharing is Way.EXCLUSIVE}
    all_right = bool(seen.answering)
    for gpu in seen.answering:
        mode = gpu.compute_mode
        # The applied gpushare.yaml gives it to one process.
        is_wanted = gpu.index in exclusive and mode is ComputeMode.EXCLUSIVE_PROCESS
        if mode is None:
            all_right = False
            text = f"the driver does not report the compute mode of GPU {gpu.index}"
            yield Check.skipped("gpu.compute_mode", gpu=gpu.index, seen=text)
        elif not (
            mode is ComputeMode.DEFAULT or gpu.uuid in served_by_gpushare or gpu.index in served_by_others or is_wanted
        ):
            all_right = False
            yield finding("gpu.compute_mode", gpu.index, mode=mode.title)
    if all_right:
        yield Check.passed("gpu.compute_mode", seen="no compute mode is left over")


def xids(seen: Examination) -> Iterator[Check]:
    """Check the kernel's log for errors after which a GPU needs a reset. Errors of programs are only listed."""
    logged = seen.host.machine.xids()
    if logged is None:
        yield Check.skipped("gpu.xid", seen="no permission to read the kernel's log: run as root")
        return
    bad = sorted({(xid.number, xid.pci) for xid in logged if xid.number in BAD_XIDS})
    for number, pci in bad:
        gpu = next((gpu for gpu in seen.gpus if _has_pci_address(gpu, pci)), None)
        yield finding("gpu.xid", None if gpu is None else gpu.index, number=number, pci=pci)
    if not bad:
        numbers = ", ".join(str(number) for number in sorted({xid.number for xid in logged}))
        yield Check.passed("gpu.xid", seen=f"Xids of programs since boot: {numbers}" if logged else "no Xid since boot")


def _has_pci_address(gpu: Gpu, pci: str) -> bool:
    """Return whether a GPU has this PCI address; NVML writes 00000000:01:00.0 where the kernel has 0000:01:00."""
    without_function = pci.lower().rsplit(".", 1)[0]
    return gpu.pci_bus_id is not None and without_function in gpu.pci_bus_id.lower()


_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_PIPE: Final = "CUDA_MPS_PIPE_DIRECTORY"
# Longer values are ignored: a path has at most 4,096 bytes, and so do a hundred UUIDs. Any user may set a megabyte.
_MOST_CHARACTERS: Final = 4096
_MOST_VALUES: Final = 10
_MOST_LOOKED_AT: Final = 256

Key = TypeVar("Key")


def environments(seen: Examination) -> Iterator[Check]:
    """Check which devices and daemons the environments of live programs name, shells included."""
    if seen.nvml_error is not None or len(seen.answering) != len(seen.gpus):
        return
    variables = {
        pid: {name: value for name, value in environment.items() if len(value) <= _MOST_CHARACTERS}
        for pid, environment in seen.host.machine.environments((*_DEVICES, _PIPE)).items()
    }
    yield from _absent_devices(seen, variables)
    yield from _uuids_of_other_instances(seen, variables)
    yield from _absent_daemons(seen, variables)


def _absent_devices(seen: Examination, environments: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    """Check for programs whose environment names a GPU or MIG device that does not exist."""
    present = {gpu.uuid for gpu in seen.gpus} | {mig.uuid for gpu in seen.gpus for mig in gpu.mig_instances}
    by_value: dict[tuple[str, str], list[int]] = {}
    for pid, environment in sorted(environments.items()):
        for variable in _DEVICES:
            for uuid in DEVICE_UUID.findall(environment.get(variable, "")):
                if uuid not in present:
                    by_value.setdefault((variable, uuid), []).append(pid)

    def finding_of(value: tuple[str, str], processes: str) -> Check:
        kind = "mig" if value[1].startswith("MIG-") else "gpu"
        return finding(f"{kind}.environment", variable=value[0], uuid=value[1], processes=processes)

    yield from _findings_by_value(seen, by_value, finding_of, "gpu.environment more")


def _findings_by_value(
    seen: Examination, by_value: Mapping[Key, list[int]], finding_of: Callable[[Key, str], Check], more: str
) -> Iterator[Check]:
    """Yield a finding for each of the first values in environments; the row ``more`` of the findings counts the others.

    ``by_value`` has the PIDs with each value; ``finding_of`` takes a value and its processes in words.
    """
    shown = _first_values(seen, by_value)
    for value in shown:
        yield for_owner(seen, finding_of(value, _processes_text(seen, by_value[value])), by_value[value])
    if len(by_value) > len(shown):
        yield finding(more, number=len(by_value) - len(shown))


def _first_values(seen: Examination, by_value: Mapping[Key, list[int]]) -> list[Key]:
    """Return the values to report, at most ten: those of this shell, then of this user and root, then of others."""

    def of_others(value: Key) -> bool:
        info = seen.host.processes.describe(by_value[value][0])
        return info is None or info.uid not in {seen.host.uid, 0}

    own = [value for value, pids in by_value.items() if os.getpid() in pids]
    # Other users can set any number of values: not all are looked at.
    rest = islice((value for value in by_value if value not in own), _MOST_LOOKED_AT)
    return [*own, *sorted(rest, key=of_others)][:_MOST_VALUES]


def _uuids_of_other_instances(seen: Examination, environments: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    """Check programs not yet on the GPU for MIG UUIDs that no longer mean the instance that they were chosen for."""
    running = {process.pid for gpu in seen.gpus for process in gpu.processes or ()}
    pids_by_uuid: dict[str, list[int]] = {}
    for pid, environment in sorted(environments.items()):
        uuid = environment.get("CUDA_VISIBLE_DEVICES", "")
        if uuid.startswith("MIG-") and pid not in running:
            pids_by_uuid.setdefault(uuid, []).append(pid)
    # Few hosts have such a program; only then the ledger of MIG changes is read.
    meanings = dict(_reused_uuids(seen)) if pids_by_uuid else {}
    for uuid, pids in pids_by_uuid.items():
        if uuid in meanings:
            check = finding(
                "mig.environment other", uuid=uuid, meaning=meanings[uuid], processes=_processes_text(seen, pids)
            )
            yield for_owner(seen, check, pids)


def _reused_uuids(seen: Examination) -> Iterator[tuple[str, str]]:
    """Yield the MIG UUID of each instance that now covers the first slice of a named one, with both in words."""
    named = list(names_of(seen.host).values())
    for gpu in seen.gpus:
        named_here = [name for name in named if name.gpu_uuid == gpu.uuid]
        if not named_here or not gpu.mig_enabled:
            continue
        with contextlib.suppress(GpushareError):
            for place in places_on(seen.host, gpu):
                instance = place.instance
                for former in named_here:
                    covers_start = instance.placement.mask >> former.start & 1
                    if covers_start and former.place != instance.place:
                        yield place.mig.uuid, f"{instance} now, where {former.name} meant {former}"


def _absent_daemons(seen: Examination, environments: Mapping[int, Mapping[str, str]]) -> Iterator[Check]:
    """Check for programs whose environment names a pipe directory where no MPS daemon listens."""
    # A daemon whose directory is unknown may listen anywhere.
    if seen.daemons_error is not None or any(entry.daemon.pipe_directory is None for entry in seen.daemons):
        return
    if seen.host.processes.namespace_is_host() is False:
        return
    served = {
        path
        for entry in seen.daemons
        for path in _comparable_paths(entry.daemon.pipe_directory or "", trusted=entry.trusted)
    }
    by_value: dict[str, list[int]] = {}
    for pid, environment in sorted(environments.items()):
        pipe = environment.get(_PIPE)
        # Root also sees values that other users have set.
        trusted = not seen.host.root or pid == os.getpid()
        if pipe and not _is_outside_mps(seen, pipe) and served.isdisjoint(_comparable_paths(pipe, trusted=trusted)):
            by_value.setdefault(pipe, []).append(pid)

    def finding_of(pipe: str, processes: str) -> Check:
        return finding("mps.environment", value=cut(pipe, MOST_SHOWN), processes=processes)

    yield from _findings_by_value(seen, by_value, finding_of, "mps.environment more")


def _is_outside_mps(seen: Examination, pipe: str) -> bool:
    """Return whether a pipe directory is one that `gpushare run` gives a program to keep it outside MPS: .../mig/KEY."""
    path = PurePath(pipe)
    keys = {device_key(device.uuid) for gpu in seen.gpus for device in devices_of(gpu) if device.uuid}
    return path.parent.name == "mig" and path.name in keys


def _comparable_paths(path: str, *, trusted: bool) -> set[str]:
    """Return a path normalized; ``trusted`` also resolved. Another user's may lead into a file system that hangs."""
    plain = "/" + os.path.normpath(path).lstrip("/") if path.startswith("/") else path
    # A link to /run on every distribution.
    plain = plain.removeprefix("/var") if plain.startswith("/var/run/") else plain
    return {plain, os.path.realpath(path)} if trusted else {plain}


def _processes_text(seen: Examination, pids: list[int]) -> str:
    """Return whose environment it is: this shell's, a process's, or how many processes have it."""
    if os.getpid() in pids:
        # gpushare inherits what the shell exports; the shell's own /proc entry shows only what it was started with.
        others = len(pids) - 1
        return "the environment of this shell" + (f" and of {others} other processes" if others else "")
    title = f"process {process_title(seen, pids[0])}"
    return title if len(pids) == 1 else f"{len(pids)} processes, the first {title}"


_AT_MOST: Final = 3


def drift(seen: Examination) -> Iterator[Check]:
    """Check that the GPUs are as the last applied gpushare.yaml says, and that it can be applied again at boot."""
    # Only root sees grants and the daemons of others.
    if seen.nvml_error is not None or not seen.host.root:
        return
    if seen.wanted_error is not None:
        yield finding("host.file", error=seen.wanted_error)
    kept = [gpu for gpu in seen.answering if gpu.index in seen.wanted]
    if not kept:
        return
    wrong = False
    for live in live_gpus(HostState(seen.host, kept), kept):
        try:
            drifted = any(point.found != "unknown" for point in diff_points(live, seen.wanted[live.gpu.index]))
        except GpushareError:
            # It has no such profile any more: `gpushare diff` says so, and the other GPUs are still compared.
            drifted = True
        if drifted:
            wrong = True
            yield finding("host.drift", live.gpu.index, file=applied_path(seen.host))
    if not wrong:
        yield Check.passed("host.drift", seen=f"{counted(len(kept), 'GPU')} as applied ({applied_path(seen.host)})")


def examine(host: Host) -> list[Check]:
    """Run every check. None of them changes anything, and none fails because another did."""
    examination = Examination(host)
    with _storing_error(examination, "nvml_error"):
        examination.gpus = host.nvml.sweep()
        examination.driver = host.nvml.driver_version()
    if examination.nvml_error is None:
        with _storing_error(examination, "wanted_error"):
            examination.wanted, examination.wanted_error = kept_entries(host, examination.gpus)
    with _storing_error(examination, "daemons_error"):
        examination.daemons = find_daemons(host, examination.gpus)
    checks: list[Check] = []
    for check in CHECKS:
        name = check.__name__.strip("_")
        try:
            checks += check(examination)
        except GpushareError as error:
            # A GPU was lost, or a program ended, since the first look.
            checks.append(Check.skipped("doctor.unseen", seen=f"'{name}' could not be checked: {error.message}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are shown
            checks.append(
                finding("doctor.unseen", check=name, error=f"{type(error).__name__}: {cut(str(error), MOST_SHOWN)}")
            )
    return checks


@contextlib.contextmanager
def _storing_error(examination: Examination, field: str) -> Iterator[None]:
    """Store an error of the body in a field of the examination, so that the checks that do not need its answer still run."""
    try:
        yield
    except GpushareError as error:
        setattr(examination, field, error)
    except Exception as error:  # noqa: BLE001 - as for the checks
        system = system_error(error) if isinstance(error, OSError) else None
        text = f"{type(error).__name__}: {cut(str(error), MOST_SHOWN)}"
        setattr(examination, field, system or OperationFailed(text, "please report it: gpushare doctor -o json"))


def _nvml(seen: Examination) -> Iterator[Check]:
    """Check that the library and the driver answer, and that every GPU does."""
    error = seen.nvml_error
    if isinstance(error, NvmlMissing):
        yield finding("nvml.library", error=error)
        return
    yield Check.passed("nvml.library", seen="libnvidia-ml answers" if error is None else "libnvidia-ml is installed")
    if error is not None:
        is_mismatch = error.code == "driver_mismatch"
        name = "driver.mismatch" if is_mismatch else "nvml.answers"
        yield finding("driver.loaded" if isinstance(error, DriverNotLoaded) else name, error=error)
        return
    yield Check.passed("driver.loaded", seen=f"driver {seen.driver or 'of unknown version'}")
    if not seen.gpus:
        yield finding("gpu.present")
    for gpu in seen.gpus:
        if gpu.error is not None:
            yield finding("gpu.answers", gpu.index, error=gpu.error)


def _smi(seen: Examination) -> Iterator[Check]:
    """Check that nvidia-smi runs and lists the time-slices, which later checks need too."""
    host = seen.host
    if host.programs.find(NVIDIA_SMI) is None:
        yield finding("smi.program")
        return
    if seen.nvml_error is not None:
        yield Check.skipped("smi.program", seen="nvidia-smi is installed; it was not run because NVML does not answer")
        return
    try:
        seen.levels = host.policy.read()
    except GpushareError as error:
        yield finding("smi.program failed", error=error, remedy=remedy_of(error))
        return
    yield Check.passed("smi.program", seen=f"nvidia-smi lists the time-slice of {counted(len(seen.levels), 'GPU')}")


def _run_directory(seen: Examination) -> Iterator[Check]:
    """Check that gpushare can keep its records and the pipes of daemons in its run directory; it is not created."""
    path = nearest = seen.host.run_directory
    # One above it may be a directory that this user may not search.
    while not os.path.exists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        # The pipe directory of any GPU: its path must not be too long for a daemon.
        home_of(path, "GPU-00000000").check_path()
        if path.exists():
            make_private_directory(path)
        elif not os.access(nearest, os.W_OK):
            yield finding("run.directory missing", path=path, parent=nearest)
            return
    except GpushareError as error:
        yield finding("run.path" if isinstance(error, BadUsage) else "run.directory", error=error)
        return
    yield Check.passed("run.directory", seen=f"{path} ({counted(len(homes_in([path])), 'daemon')} recorded)")


def _permissions(seen: Examination) -> Iterator[Check]:
    """Check that this user may open the device nodes, and say what the user may change."""
    user = "root" if seen.host.uid == 0 else f"user {seen.host.uid}"
    if not seen.host.root:
        user += ": MPS and the time-slices of your own jobs work; time-slice level, compute mode and MIG need root"
    elif seen.host.uid != 0:
        user += ", who may do what root may"
    yield Check.passed("user.root", seen=f"commands run as {user}")
    nodes = ("/dev/nvidiactl", "/dev/nvidia0")
    closed = [node for node in nodes if os.path.exists(node) and not os.access(node, os.R_OK | os.W_OK)]
    if closed and not seen.host.is_simulated:
        yield finding("device.nodes", nodes=", ".join(closed), arguments=" ".join(closed))


def _pid_namespace(seen: Examination) -> Iterator[Check]:
    """Check that PIDs here are those of the host, which the driver reports."""
    is_host = seen.host.processes.namespace_is_host()
    if is_host is None:
        yield Check.skipped("pid.namespace", seen="unknown")
    else:
        passed = Check.passed("pid.namespace", seen="the host's PID namespace")
        yield passed if is_host else finding("pid.namespace", why=BLIND)


def _records(seen: Examination) -> Iterator[Check]:
    """Check that every record can be read: no command sees what an unreadable one is about."""
    # Not the journal of MIG changes: the check of MIG modes tells what became of it.
    kinds: tuple[RecordStore[Any], ...] = (
        *(SWAPS, PAUSES, JOBS, RECORDS, KEEPS, LENT, MODES, DAEMONS, MADE),
        *(NAMES, TUNED, BENCHED, PROFILES),
    )
    all_readable = True
    # Directories that cannot be read: many kinds of records are below the same one.
    directories: set[Path] = set()
    for records in kinds:
        # The bad records of one user must not hide those of others.
        counts: Counter[int] = Counter()
        for unread in records.unread(seen.host):
            path, uid = unread.path, unread.uid
            all_readable = False
            if path in directories:
                continue
            counts[uid] += 1
            if counts[uid] > _AT_MOST:
                continue
            # By its name: the path may be a link of another user, which nothing follows.
            kind = records.noun
            if path.suffix != ".json":
                directories.add(path)
                kind = "the directory of records"
            remedy = _record_remedy(seen.host, records, unread)
            owner = "" if uid == seen.host.uid else f" (of {user_name(uid)})"
            yield finding("records.unread", kind=kind, path=path, owner=owner, reason=unread.why, remedy=remedy)
        for uid, count in counts.items():
            if count > _AT_MOST:
                yield finding("records.unread more", number=count - _AT_MOST, user=user_name(uid))
    if all_readable:
        yield Check.passed("records.unread", seen="every record can be read")


def _record_remedy(host: Host, records: RecordStore[Any], unread: Unread) -> str:
    """Return what to do about a record, or a directory of records, that is not read.

    Root leaves that to its user: that user may have replaced the directory by a link.
    """
    if unread.uid != host.uid:
        return f"tell {user_name(unread.uid)}, whose it is"
    if isinstance(unread.error, OtherNamespace):
        # Its job may well live, and its PIDs are other processes here.
        return "see it where it was written, in a container or on its host: gpushare doctor"
    path, quoted = unread.path, shlex.quote(str(unread.path))
    if path.suffix == ".json":
        # Without its record a job that is off the GPU stays there; the driver knows what became of the process.
        verb = {SWAPS.directory: "swap in", PAUSES.directory: "resume"}.get(records.directory)
        back = f"gpushare {verb} {path.stem}; then " if verb and path.stem.isdecimal() else ""
        return f"{back}remove it: rm {quoted}"
    look = f"see whose it is: ls -ld {quoted}"
    # Of a link, chmod would change what it leads to.
    return f"{look}; if yours, close it: chmod go-w {quoted}" if "others may write" in unread.why else look


def _command_for(uid: int | None, record: Path, words: str) -> str:
    """Return ``gpushare WORDS`` run as the owner ``uid`` of a record, with sudo; None: this user, who needs none."""
    if not uid:
        return f"gpushare {words}" if uid is None else f"sudo gpushare {words}"
    return command_as_user(user_name(uid), record.parent.parent, words)


def _pauses(seen: Examination) -> Iterator[Check]:
    """Check that each paused job has a guard, or a `gpushare run`, that ends its pause."""
    jobs = paused_jobs(seen.host)
    wrong = False
    for job in jobs:
        if not job.has_live_keeper(seen.host):
            wrong = True
            remedy = _command_for(job.keeper_uid, job.path, f"resume {job.pid}")
            keeper = "the gpushare run that paused it" if job.by_run else "its guard"
            yield finding("pause.guard", job=job, keeper=keeper, remedy=remedy)
    if jobs and not wrong:
        yield Check.passed(
            "pause.guard", seen=f"{counted(len(jobs), 'job')} with a record of a pause, each with its guard"
        )


def _memory_limits(seen: Examination) -> Iterator[Check]:
    """Check that the memory of each job with a limit is watched."""
    for job in reservations(seen.host) or ():
        if job.limit_bytes is None or not job.held or job.claim.kept:
            continue
        # A claim may name the processes of other users: nobody is told to end those.
        pids = [*owners_of(seen.host, [job], [process.pid for process in job.claim.processes])]
        if pids:
            check = finding("memory.limit", job=job, pid=pids[0], limit=format_bytes(job.limit_bytes))
            yield for_owner(seen, check, pids)


# An unfinished swap counts as interrupted after this.
_ON_ITS_WAY_SECONDS: Final = 600.0


def _swaps(seen: Examination) -> Iterator[Check]:
    """Check that no swapped job is lost, or half out."""
    jobs = [job for job in swaps(seen.host) if job.state != BACK]
    wrong = False
    for job in jobs:
        if job.state == LOST:
            wrong = True
            yield finding("swap.lost", job=job, remedy=_command_for(job.keeper_uid, job.path, f"stop {job.pid}"))
        elif job.state in {LEAVING, RETURNING}:
            seconds_in_state = uptime() - job.since
            with contextlib.suppress(OSError):
                # The record is written when the state changes.
                seconds_in_state = time.time() - job.path.stat().st_mtime
            if seconds_in_state > _ON_ITS_WAY_SECONDS:
                wrong = True
                age = counted(int(seconds_in_state // 60), "minute")
                remedy = _command_for(job.keeper_uid, job.path, f"swap in {job.pid}")
                yield finding("swap.interrupted", job=job, age=age, remedy=remedy)
    if jobs and not wrong:
        yield Check.passed("swap.lost", seen=f"{counted(len(jobs), 'job')} swapped out, none lost")


# They have every GPU open on many hosts, and no memory there. The kernel keeps 15 characters of a name.
_DAEMONS: Final = tuple(
    name[:15] for name in ("nvidia-persistenced", "nv-hostengine", "nv-fabricmanager", "dcgm-exporter", "nvidia-smi")
)


def _may_hold_memory(seen: Examination, pid: int) -> bool:
    """Return whether a process that has a GPU open may hold its memory: no daemon of NVIDIA, no job that is swapped out."""
    info = seen.host.processes.describe(pid)
    if info is None or (info.name or "").startswith(_DAEMONS):
        return False
    return all(pid != image.pid for swap in swaps(seen.host) if swap.state != BACK for image in swap.images)


def _unlisted(seen: Examination) -> Iterator[Check]:
    """Check that the memory in use belongs to processes."""
    # What virtual machines have on a hypervisor is not in the lists of processes.
    if seen.nvml_error is not None or HostState(seen.host, seen.gpus).in_foreign_namespace or seen.host.makes_vgpus():
        return
    many = [gpu for gpu in seen.answering if (gpu.unlisted_bytes or 0) > MUCH_UNLISTED]
    # A process may have come or gone between the two reads.
    again = [seen.host.nvml.gpu(gpu.index) for gpu in many]
    held = [gpu for gpu in again if (gpu.unlisted_bytes or 0) > MUCH_UNLISTED]
    files = seen.host.processes.open_files("/dev/nvidia") if held else None
    if files is not None:
        for gpu in held:
            yield _unlisted_finding(seen, gpu, files)
    unknown = [gpu.index for gpu in seen.answering if gpu.unlisted_bytes is None]
    for index in unknown:
        yield Check.skipped(
            "gpu.unlisted_memory",
            gpu=index,
            seen=f"the driver does not report the memory of GPU {index}, or that of its processes",
        )
    if seen.answering and not held and not unknown:
        yield Check.passed("gpu.unlisted_memory", seen="all memory in use belongs to processes")


def _unlisted_finding(seen: Examination, gpu: Gpu, files: OpenFiles) -> Check:
    """Return the finding that memory of a GPU belongs to no process, with the processes that have the GPU open."""
    listed = {process.pid for process in gpu.processes or ()}
    minor = seen.host.nvml.minor_number(gpu.index)
    holders = [] if minor is None else files.holders_of(f"/dev/nvidia{minor}")
    pids = sorted(set(holders) - listed - {os.getpid()})
    titles = ", ".join(process_title(seen, pid) for pid in pids[:_AT_MOST])
    suspects = [pid for pid in pids if pid > 1 and _may_hold_memory(seen, pid)][:_AT_MOST]
    own = [pid for pid in suspects if whom_to_ask(seen, [pid]) is None]
    if suspects:
        remedy = f"end what has it open: kill {' '.join(map(str, own or suspects))}"
    elif not files.complete:
        remedy = f"see who has it open, as root: sudo fuser -v /dev/nvidia{'*' if minor is None else minor}"
    else:
        remedy = f"when it is idle: sudo nvidia-smi --gpu-reset -i {gpu.index}; where that is refused, reboot"
    check = finding(
        "gpu.unlisted_memory",
        gpu.index,
        size=format_bytes(gpu.unlisted_bytes),
        holders=f"; open in {titles}" if titles else "",
        remedy=remedy,
    )
    return for_owner(seen, check, suspects) if suspects and not seen.host.root else check


# A process that holds more than this, and has done nothing for this long, is mentioned.
_IDLE_SECONDS: Final = 3600.0


def _idle(seen: Examination) -> Iterator[Check]:
    """Check that no process holds memory and does nothing, besides the paused ones."""
    if seen.nvml_error is not None or HostState(seen.host, seen.gpus).in_foreign_namespace:
        return
    now = time.time()
    paused = paused_processes(seen.host)
    for gpu in seen.answering:
        # The percentage is unknown, not 0, for clients of MPS and under MIG.
        idle = [
            process
            for process in gpu.processes or ()
            if process.compute
            and process.sm_percent == 0
            and (process.memory_used_bytes or 0) > MUCH_UNLISTED
            and process.pid not in paused
        ]
        # By PID, the time of the last sample with work, of all that the driver remembers.
        times = or_none(lambda gpu=gpu: seen.host.nvml.last_work(gpu.index, 0.0)) if idle else None  # type: ignore[misc]
        if times is None:
            continue
        for process in idle:
            info = seen.host.processes.describe(process.pid)
            if info is None or info.started_at is None:
                continue
            worked = max(times.get(process.pid, 0.0), info.started_at)
            if now - worked < _IDLE_SECONDS:
                continue
            has_time = process.pid in times
            since = f"for {format_duration(now - worked)}" if has_time else "for as long as the driver remembers"
            may_swap = seen.host.root or info.uid == seen.host.uid
            swap = f"; or move it to host memory: gpushare swap out {process.pid}" if may_swap else ""
            yield finding(
                "gpu.idle_memory",
                gpu.index,
                process=process_title(seen, process.pid),
                size=format_bytes(process.memory_used_bytes),
                since=since,
                remedy=f"{ending_hint(seen.host, process.pid)}{swap}",
            )


def _keep_remedy(*, has_own_rules: bool) -> str:
    """Return how rules come to be followed: those of a user by that user's keep, as the unit follows root's file."""
    if has_own_rules:
        return "gpushare timeslice keep"
    export = "sudo gpushare export systemd --to units; sh units/apply.sh"
    return f"sudo systemctl enable --now {KEEP_UNIT}; if there is none: {export}; or: sudo gpushare timeslice keep"


def _rules(seen: Examination) -> Iterator[Check]:
    """Check that `gpushare timeslice keep` runs if the file that was applied last has rules for time-slices."""
    applied = kept_file(seen.host)
    keep = keep_record(seen.host)
    rules = 0 if applied is None else len(applied.rules)
    runs = keep is not None and keep.runs
    # `timeslice reset` of a process removes its own record, but not its name from that of keep.
    recorded = slice_records(seen.host)
    unrestored = () if keep is None or runs else [process for process in keep.processes if process.pid in recorded]
    remedy = _keep_remedy(has_own_rules=rules > 0 and not seen.host.root)
    if unrestored:
        yield finding("timeslice.rules killed", number=counted(len(unrestored), "process"), remedy=remedy)
    elif rules and not runs:
        yield finding("timeslice.rules", number=counted(rules, "rule"), file=applied_path(seen.host), remedy=remedy)
    elif keep is not None and runs:
        number = counted(len(keep.processes), "process")
        yield Check.passed("timeslice.rules", seen=f"gpushare timeslice keep runs (process {keep.pid}), for {number}")


def _levels(seen: Examination) -> Iterator[Check]:
    """Check that no bench was killed while it had set a time-slice level."""
    for gpu in seen.answering:
        level = seen.levels.get(gpu.index)
        before = level_before_killed(seen.host, gpu)
        if before is None or level is None:
            continue
        command = "reset" if before is TimeSlice.DEFAULT else f"set {before.title}"
        yield finding("timeslice.level", gpu.index, now=level, before=before, command=command)


CHECKS: Final[tuple[Callable[[Examination], Iterator[Check]], ...]] = (
    _nvml,
    _smi,
    mps_programs,
    persistence,
    power,
    compute_mode,
    xids,
    mps_daemons,
    *USE_CHECKS,
    drift,
    *MIG_CHECKS,
    environments,
    _run_directory,
    _permissions,
    _pid_namespace,
    _records,
    _pauses,
    _memory_limits,
    _swaps,
    _unlisted,
    _idle,
    _levels,
    _rules,
)


def worst_verdict(checks: list[Check]) -> Verdict:
    """Return the worst verdict: pass, warn or fail. Skipped checks do not count."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in (Verdict.FAIL, Verdict.WARN) if verdict in verdicts), Verdict.PASS)
