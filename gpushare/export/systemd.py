"""systemd units: the whole host at boot, and each MPS daemon in the foreground. Pure.

Compute mode, slice level, MPS daemons and, on Hopper and later, MIG itself are gone after a reboot. Facts: NVIDIA's MPS
guide and the program's own help (`nvidia-cuda-mps-control -f` stays in the foreground and dies by SIGTERM; `quit` lets
clients finish), systemd.service(5), systemd.exec(5).
"""

from __future__ import annotations

from typing import Final

from gpushare.base.errors import BadUsage
from gpushare.base.model import ComputeMode, Priority, Way, device_key
from gpushare.base.units import mps_memory, mps_memory_readback, mps_percentage
from gpushare.export.containers import ExportedDevice
from gpushare.export.description import HostDescription
from gpushare.export.document import Document, Export, notes, render_file
from gpushare.host.host import SYSTEM_STATE_DIRECTORY
from gpushare.hostfile.file import MpsWish
from gpushare.hostfile.kept import KEPT
from gpushare.mps.control import start_argv
from gpushare.mps.home import LIMIT_FILE, UNIT_RUNTIME, pipe_directory, unit_name
from gpushare.timeslice.rules import KEEP_UNIT

# The last file that held, as `gpushare apply` keeps it.
FILE: Final = f"{SYSTEM_STATE_DIRECTORY}/{KEPT}"
HOST_UNIT: Final = "gpushare.service"
READY: Final = "gpushare-mps-ready"
READY_PATH: Final = f"/usr/local/lib/gpushare/{READY}"
# A change of MIG resets GPUs; nvidia-mig-manager.service has the same bound.
APPLY_SECONDS: Final = 480
DRAIN_SECONDS: Final = 60


def units_export(
    host: HostDescription, *, program: str = "/usr/bin/gpushare", file: str = FILE, rules: bool = False
) -> Export:
    """Return the units; ``program`` is the absolute path of gpushare on the host, ``file`` the gpushare.yaml for boot.

    ``rules``: the file has rules for time-slices, which a unit of its own follows.
    """
    _check_unit_path("--program", program, "/opt/gpushare")
    _check_unit_path("--at-boot", file, "/etc/gpushare.yaml")
    mps_units = [
        Document(name=unit_name(device.uuid), text=_mps_unit(device, mps, program), kind="unit")
        for gpu in host.gpus
        for device in (ExportedDevice(gpu=gpu, mig=mig) for mig in (None, *gpu.mig))
        if (mps := device.mps) is not None
    ]
    host_text = _host_unit(host, program, file, [unit.name for unit in mps_units])
    documents = [Document(name=HOST_UNIT, text=host_text, kind="unit"), *mps_units]
    if rules:
        keep_text = render_file("gpushare-timeslice.service", FILE=file, PROGRAM=program, HOST=HOST_UNIT)
        documents.append(Document(name=KEEP_UNIT, text=keep_text, kind="unit"))
    if mps_units:
        documents.append(Document(name=READY, text=render_file("mps-ready.sh", LIMIT=LIMIT_FILE), kind="sh"))
    first = "sudo gpushare apply -f gpushare.yaml"
    if file != FILE:
        first = f"sudo install -m 644 gpushare.yaml {file}"
    return Export(
        documents=tuple(documents),
        commands=(
            # The units would fail at the next boot, or be skipped without a word.
            f"sudo test -x {program} || {{ echo '{program} is missing; name the path: gpushare export systemd --program PATH' >&2; false; }}",
            f"sudo test -e {file} || {{ echo '{file} is missing; first: {first}' >&2; false; }}",
            *_commands([document.name for document in documents]),
        ),
        needs=notes("systemd", "needs", host.traits, file=file, first=first, unit=HOST_UNIT, runtime=UNIT_RUNTIME),
        lost=notes("systemd", "lost", host.traits),
    )


def _check_unit_path(option: str, path: str, example: str) -> None:
    """Raise BadUsage if a path cannot stand in a unit as it is."""
    if not path.startswith("/") or any(character in path for character in " \t\n\"'\\%$;|&"):
        raise BadUsage(
            f"'{path[:80]}' cannot be used in a unit",
            f"give an absolute path without spaces or special characters: {option} {example}",
            code="bad_path",
        )


def _host_unit(host: HostDescription, program: str, file: str, after: list[str]) -> str:
    """Return the unit that applies the file at boot, before Docker, Kubernetes, Slurm and the units ``after`` it start."""
    # A driver before 580 lists profiles only while MIG is on, and on Hopper it is off after a reboot.
    major = (host.driver or "").partition(".")[0]
    needs_mode = major.isdecimal() and int(major) < 580
    enabled = ",".join(gpu.uuid for gpu in host.gpus if needs_mode and gpu.sharing is Way.MIG)
    enable = f"# Without MIG on, this driver does not list the profiles.\nExecStartPre=-{program} mig enable -g {enabled} --yes\n"
    return render_file(
        HOST_UNIT,
        FILE=file,
        PROGRAM=program,
        BEFORE=" ".join([*after, "docker.service", "containerd.service", "kubelet.service", "slurmd.service"]),
        MIG=enable if enabled else "",
        SECONDS=APPLY_SECONDS,
    )


def _mps_unit(device: ExportedDevice, mps: MpsWish, program: str) -> str:
    """Return the unit that runs the daemon of a device in the foreground and sets its limits."""
    uuid = device.uuid
    pipe = pipe_directory(uuid)
    directory = f"{UNIT_RUNTIME}/{device_key(uuid)}"
    # Lines of the unit: what is done before the daemon starts, and after it has ended.
    before = ""
    after = ""
    if device.mig is None and device.gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS:
        before = f"ExecStartPre=/usr/bin/nvidia-smi -i {uuid} -c EXCLUSIVE_PROCESS\n"
        after = f"# A GPU starts in compute mode default, so that is what to restore.\nExecStopPost=/usr/bin/nvidia-smi -i {uuid} -c DEFAULT\n"
    if mps.users:
        # systemd would expand a $.
        entries = ",".join([*(f"u:{user.replace('$', '$$')}:rx" for user in mps.users), "m::rx"])
        before += f"ExecStartPre=/usr/bin/setfacl -m {entries} {pipe}\n"
    return render_file(
        "gpushare-mps.service",
        TITLE=device.title,
        UUID=uuid,
        HOST=HOST_UNIT,
        PIPE=pipe,
        DIRECTORY=directory,
        # If only some users may connect, the template closes what it creates: not the directory above.
        RUNTIME=f"{directory}/pipe" if mps.users else f"{directory} {directory}/pipe",
        MODE="0750" if mps.users else "0755",
        PROGRAM=program,
        BEFORE=before,
        START=" ".join(start_argv(foreground=True, multiuser=mps.multiuser)),
        READY=f"{READY_PATH} {_ready_arguments(mps)}",
        DRAIN=DRAIN_SECONDS,
        AFTER=after,
        # Longer than the drain, after which gpushare ends the daemon.
        STOP=DRAIN_SECONDS + 30,
    )


def _ready_arguments(mps: MpsWish) -> str:
    """Return the arguments of `READY`, the script that sets the limits of a daemon: threads, memory, priority; ``-``: none."""
    threads = "-" if mps.limits.threads_percent is None else mps_percentage(mps.limits.threads_percent)
    limit = mps.limits.memory_limit_bytes
    memory = "- -" if limit is None else f"{mps_memory(limit)} {mps_memory_readback(limit)}"
    priority = "1" if mps.limits.priority is Priority.LOW else "-"
    return f"{threads} {memory} {priority}"


def _commands(names: list[str]) -> list[str]:
    """Return the commands that install these files, and start the units among them."""
    units = " ".join(name for name in names if name.endswith(".service"))
    return [
        f"sudo install -m 644 -t /etc/systemd/system {units}",
        *([f"sudo install -D -m 755 {READY} {READY_PATH}"] if READY in names else []),
        "sudo systemctl daemon-reload",
        f"sudo systemctl enable --now {units}",
        f"systemctl status {units}",
    ]
