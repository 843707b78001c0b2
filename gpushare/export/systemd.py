"""systemd units: the whole host at boot, and each MPS daemon in the foreground. Pure.

Compute mode, slice level, MPS daemons and, on Hopper and later, MIG itself are gone after a reboot. Facts: NVIDIA's MPS
guide and the program's own help (`nvidia-cuda-mps-control -f` stays in the foreground and dies by SIGTERM; `quit` lets
clients finish), systemd.service(5), systemd.exec(5).
"""

from __future__ import annotations

from typing import Final

from gpushare.errors import BadUsage
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, MpsDescription
from gpushare.export.document import Document, Export
from gpushare.host.host import SYSTEM_STATE_DIRECTORY
from gpushare.hostfile.kept import KEPT
from gpushare.model import ComputeMode, Priority, Sharing, device_key
from gpushare.mps.home import (  # moved
    LIMIT_FILE,
    UNIT_RUNTIME,
    pipe_directory,
    unit_name,
)
from gpushare.timeslice.rules import KEEP_UNIT
from gpushare.units import mps_memory, mps_memory_readback, mps_percentage

# The last file that held, as `gpushare apply` keeps it.
FILE: Final = f"{SYSTEM_STATE_DIRECTORY}/{KEPT}"
HOST_UNIT: Final = "gpushare.service"
READY: Final = "gpushare-mps-ready"
READY_PATH: Final = f"/usr/local/lib/gpushare/{READY}"
# A change of MIG resets GPUs; nvidia-mig-manager.service has the same bound.
APPLY_SECONDS: Final = 480
DRAIN_SECONDS: Final = 60


_READY_SCRIPT: Final = """\
#!/bin/sh
# Written by gpushare. Waits until the MPS control daemon at CUDA_MPS_PIPE_DIRECTORY answers, sets its limits and
# reads each back: the daemon takes a wrong value with exit code 0 and keeps the old one.
# Arguments: threads (25.0), memory (3840M) and how the daemon prints it (3G), priority (0 or 1); - is none.
set -u
ask() { echo "$1" | timeout 10 nvidia-cuda-mps-control; }
same() {
    [ "$2" = "$3" ] || { echo "MPS: $1 is '$3', asked: '$2'" >&2; exit 1; }
}
tries=0
until ask get_default_active_thread_percentage >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 80 ] || { echo "MPS: the daemon does not answer" >&2; exit 1; }
    sleep 0.25
done
if [ "$1" != - ]; then
    ask "set_default_active_thread_percentage $1" >/dev/null
    same "thread percentage" "$1" "$(ask get_default_active_thread_percentage)"
fi
if [ "$2" != - ]; then
    ask "set_default_device_pinned_mem_limit 0 $2" >/dev/null
    same "memory limit" "$3" "$(ask 'get_default_device_pinned_mem_limit 0')"
fi
# Exactly, for gpushare: the daemon prints whole G.
echo "$2" >"${CUDA_MPS_PIPE_DIRECTORY%/pipe}/@LIMIT@"
if [ "$4" != - ]; then
    ask "set_default_client_priority $4" >/dev/null
    same "client priority" "$4" "$(ask get_default_client_priority)"
fi
"""


def units_export(
    host: HostDescription, *, program: str = "/usr/bin/gpushare", file: str = FILE, rules: bool = False
) -> Export:
    """Return the units; ``program`` is the absolute path of gpushare on the host, ``file`` the gpushare.yaml for boot.

    ``rules``: the file has rules for time-slices, which a unit of its own follows.
    """
    for option, path in (("--program", program), ("--at-boot", file)):
        _check_path(option, path)
    daemons = _daemons(host)
    units = [
        (unit_name(gpu.uuid if mig is None else mig.uuid), _mps_unit(gpu, mig, mps, program))
        for gpu, mig, mps in daemons
    ]
    documents = [
        Document(name=HOST_UNIT, text=_host_unit(host, program, file, [name for name, _ in units]), kind="unit")
    ]
    documents += [Document(name=name, text=text, kind="unit") for name, text in units]
    if rules:
        documents.append(Document(name=KEEP_UNIT, text=_keep_unit(program, file), kind="unit"))
    if units:
        documents.append(Document(name=READY, text=_READY_SCRIPT.replace("@LIMIT@", LIMIT_FILE), kind="sh"))
    return Export(
        documents=tuple(documents),
        commands=tuple(_commands([one.name for one in documents])),
        needs=tuple(_needs(file, [mps for _, _, mps in daemons])),
        lost=tuple(_lost(daemons)),
    )


def _check_path(option: str, path: str) -> None:
    if not path.startswith("/") or any(one in path for one in " \t\n\"'\\%$;|&"):
        raise BadUsage(
            f"'{path[:80]}' cannot be used in a unit",
            f"give an absolute path without spaces or special characters: {option} /opt/gpushare",
            code="bad_path",
        )


def _daemons(host: HostDescription) -> list[tuple[GpuDescription, MigDescription | None, MpsDescription]]:
    found: list[tuple[GpuDescription, MigDescription | None, MpsDescription]] = []
    for gpu in host.gpus:
        if gpu.mps is not None:
            found.append((gpu, None, gpu.mps))
        found += [(gpu, mig, mig.mps) for mig in gpu.mig if mig.mps is not None]
    return found


def _mig_first(host: HostDescription) -> list[str]:
    """Return the GPUs whose MIG mode must be on before the file is applied.

    A driver before 580 lists profiles only while MIG is on, and on Hopper it is off after a reboot.
    """
    major = (host.driver or "").partition(".")[0]
    if not major.isdecimal() or int(major) >= 580:
        return []
    return [gpu.uuid for gpu in host.gpus if gpu.sharing is Sharing.MIG]


def _host_unit(host: HostDescription, program: str, file: str, after: list[str]) -> str:
    with_mig = _mig_first(host)
    lines = [
        "# Written by gpushare.",
        "[Unit]",
        f"Description=GPU sharing as {file} says",
        "Documentation=man:gpushare(1)",
        "Wants=nvidia-persistenced.service",
        "After=nvidia-persistenced.service nvidia-fabricmanager.service",
        # Services that hand out GPUs must find them set up; containers need the new CDI specification.
        "Before=" + " ".join([*after, "docker.service", "containerd.service", "kubelet.service", "slurmd.service"]),
        f"ConditionPathExists={file}",
        "",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        # Without MIG on, this driver does not list the profiles.
        *([f"ExecStartPre=-{program} mig enable -g {','.join(with_mig)} --yes"] if with_mig else []),
        f"ExecStart={program} apply -f {file} --yes",
        f"TimeoutStartSec={APPLY_SECONDS}",
        # A restart applies the file again; MPS daemons that it started keep running, and so do their clients.
        "KillMode=process",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _keep_unit(program: str, file: str) -> str:
    lines = [
        "# Written by gpushare.",
        "[Unit]",
        f"Description=Time-slices of GPU processes as {file} says",
        "Documentation=man:gpushare-timeslice(1)",
        "Wants=nvidia-persistenced.service",
        f"After=nvidia-persistenced.service {HOST_UNIT}",
        f"ConditionPathExists={file}",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={program} timeslice keep -f {file}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=on-failure",
        "RestartSec=5",
        # A file that is wrong, or that others may write: another start does not make it better.
        "RestartPreventExitStatus=2 4 6",
        # It puts all slices back before it ends; its helper process must not end before it.
        "KillMode=mixed",
        "TimeoutStopSec=90",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _mps_unit(gpu: GpuDescription, mig: MigDescription | None, mps: MpsDescription, program: str) -> str:
    uuid = gpu.uuid if mig is None else mig.uuid
    key = device_key(uuid)
    title = f"GPU {gpu.index}" if mig is None else f"MIG {mig.profile} of GPU {gpu.index}"
    exclusive = mig is None and gpu.compute_mode is ComputeMode.EXCLUSIVE_PROCESS
    pipe = pipe_directory(uuid)
    lines = [
        "# Written by gpushare.",
        "[Unit]",
        f"Description=CUDA MPS control daemon of {title} ({uuid})",
        "Documentation=man:nvidia-cuda-mps-control(1)",
        "Wants=nvidia-persistenced.service",
        f"After=nvidia-persistenced.service {HOST_UNIT}",
        "",
        "[Service]",
        "Type=exec",
        f"Environment=CUDA_VISIBLE_DEVICES={uuid}",
        f"Environment=CUDA_MPS_PIPE_DIRECTORY={pipe}",
        f"Environment=CUDA_MPS_LOG_DIRECTORY=/var/log/{UNIT_RUNTIME}/{key}",
        # Created here, because the daemon would make it writable for everybody. If only some users may connect, it is
        # closed and an access control list lets them in. systemd sets the mode again for every command, so it is set
        # here; systemd itself keeps the directory above open.
        f"RuntimeDirectory={UNIT_RUNTIME}/{key}/pipe"
        if mps.users
        else f"RuntimeDirectory={UNIT_RUNTIME}/{key} {UNIT_RUNTIME}/{key}/pipe",
        f"RuntimeDirectoryMode={'0750' if mps.users else '0755'}",
        f"LogsDirectory={UNIT_RUNTIME}/{key}",
        # A daemon that `gpushare apply` started is stopped once its clients have left. 6: there is none.
        f"ExecStartPre=/bin/sh -c '{program} mps stop -g {uuid} --yes || [ $$? -eq 6 ]'",
        *([f"ExecStartPre=/usr/bin/nvidia-smi -i {uuid} -c EXCLUSIVE_PROCESS"] if exclusive else []),
        *([f"ExecStartPre=/usr/bin/setfacl -m {_entries(mps.users)} {pipe}"] if mps.users else []),
        "ExecStart=/usr/bin/nvidia-cuda-mps-control -f",
        f"ExecStartPost={READY_PATH} {_ready_arguments(mps)}",
        f"ExecStop=/bin/sh -c '{program} mps stop --pipe-directory {pipe} --drain {DRAIN_SECONDS} --yes || [ $$? -eq 6 ]'",
        # A GPU starts in compute mode default, so that is what to restore.
        *([f"ExecStopPost=/usr/bin/nvidia-smi -i {uuid} -c DEFAULT"] if exclusive else []),
        "TimeoutStartSec=90",
        f"TimeoutStopSec={DRAIN_SECONDS + 30}",
        # SIGTERM only to the daemon, which ends its servers: a signal to those would break their clients.
        "KillMode=mixed",
        "Restart=on-failure",
        "RestartSec=5",
        # A server needs many open files for many clients (MPS guide).
        "LimitNOFILE=16384",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _entries(users: tuple[str, ...]) -> str:
    # systemd would expand a $.
    return ",".join([*(f"u:{user.replace('$', '$$')}:rx" for user in users), "m::rx"])


def _ready_arguments(mps: MpsDescription) -> str:
    threads = "-" if mps.limits.threads_percent is None else mps_percentage(mps.limits.threads_percent)
    limit = mps.limits.memory_limit_bytes
    memory = "- -" if limit is None else f"{mps_memory(limit)} {mps_memory_readback(limit)}"
    priority = "1" if mps.limits.priority is Priority.LOW else "-"
    return f"{threads} {memory} {priority}"


def _commands(names: list[str]) -> list[str]:
    units = [name for name in names if name.endswith(".service")]
    lines = [f"sudo install -m 644 -t /etc/systemd/system {' '.join(units)}"]
    if READY in names:
        lines.append(f"sudo install -D -m 755 {READY} {READY_PATH}")
    return [
        *lines,
        "sudo systemctl daemon-reload",
        f"sudo systemctl enable --now {' '.join(units)}",
        f"systemctl status {' '.join(units)}",
    ]


def _needs(file: str, daemons: list[MpsDescription]) -> list[str]:
    needs = [
        f"{file}: without it {HOST_UNIT} does nothing; gpushare apply -f FILE writes it",
        "nvidia-persistenced.service, which loads the driver at boot",
    ]
    if daemons:
        needs += [
            "systemd 240 or later (Type=exec)",
            "limits to be changed in the unit: gpushare apply leaves its daemon alone",
            f"programs to be started with the directory of the unit's daemon: CUDA_MPS_PIPE_DIRECTORY=/run/{UNIT_RUNTIME}/.../pipe",
        ]
    if any(one.users for one in daemons):
        needs.append("setfacl (package acl), which lets in only the users that 'users' names")
    return needs


def _lost(daemons: list[tuple[GpuDescription, MigDescription | None, MpsDescription]]) -> list[str]:
    lost = []
    if any(mig is not None for _, mig, _ in daemons):
        lost.append(
            "stable MIG UUIDs: after a new MIG layout a UUID can name a device of another size; then export the units again"
        )
    return lost
