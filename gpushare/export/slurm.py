"""Slurm: gres.conf, lines for slurm.conf, and the scripts that gres/mps needs. Pure.

Facts: SchedMD/slurm 26.05 (src/interfaces/gres.c, src/plugins/gres/common/gres_c_s.c, gpu_nvml.c), gres.conf(5). Slurm
shares per GPU: shard only counts programs, mps also caps their threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gpushare.errors import BadUsage, NotSupported
from gpushare.export.description import GpuDescription, HostDescription, MigDescription, short_model
from gpushare.export.document import Document, Export
from gpushare.export.k8s import DEFAULT_REPLICAS
from gpushare.model import Sharing, TimeSlice
from gpushare.units import GIB, mps_memory, mps_memory_readback

STATE: Final = "/run/gpushare-slurm"

_COMMON: Final = """\
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# slurmd starts it without PATH: what is not exported is not known to timeout and env.
export PATH
state=@STATE@
umask 022

say() { echo "gpushare: $*" >&2; logger -t gpushare-slurm "$*" 2>/dev/null || :; }

# Send one command to the daemon of $home. Exit code: 0 it answered, 1 nobody listens, 124 it hangs.
ask() { echo "$1" | CUDA_MPS_PIPE_DIRECTORY="$home/pipe" timeout "${2:-10}" nvidia-cuda-mps-control 2>/dev/null; }

# One field of /proc/PID/status.
field() {
    while read -r key value rest; do
        [ "$key" != "$2:" ] || { echo "$value"; return 0; }
    done <"/proc/$1/status"
} 2>/dev/null

# PID:START of a live process, because PIDs are reused.
identity() {
    line=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- "$1" ${line##*)}
    [ "$2" != Z ] && echo "$1:${21}"
}

is_mps() {
    { read -r name <"/proc/$1/comm"; } 2>/dev/null || return 1
    case $name in nvidia-cuda-mps*) return 0 ;; *) return 1 ;; esac
}

# The daemon of $home, which runs as this user with that directory, and its servers. Not by its PID file, which everybody
# may write.
daemon_processes() {
    daemons=" "
    for one in /proc/[0-9]*; do
        pid=${one#/proc/}
        is_mps "$pid" && [ "$(field "$pid" Uid)" = "$(id -u)" ] || continue
        tr '\\0' '\\n' 2>/dev/null <"$one/environ" | grep -qxF "CUDA_MPS_PIPE_DIRECTORY=$home/pipe" || continue
        daemons="$daemons$pid "
    done 2>/dev/null
    [ "$daemons" != " " ] || return 0
    for one in /proc/[0-9]*; do
        pid=${one#/proc/}
        is_mps "$pid" || continue
        case $daemons in *" $pid "* | *" $(field "$pid" PPid) "*) identity "$pid" ;; esac
    done
}

# End the processes left of the daemon of $home.
end_by_signals() {
    found=$(daemon_processes)
    for signal in TERM KILL; do
        tries=0
        while :; do
            left=
            for one in $found; do
                [ "$(identity "${one%:*}")" != "$one" ] || left="$left ${one%:*}"
            done
            [ -n "$left" ] || return 0
            [ "$tries" -gt 0 ] || kill -s "$signal" $left 2>/dev/null
            tries=$((tries + 1))
            [ "$tries" -le 10 ] || break
            sleep 0.5
        done
    done
    return 1
}

# Allow only the users of the jobs of $home to connect, because anybody who may connect can block the daemon.
# The directory stays root's: the daemon would follow a link that the owner of the directory put there.
let_in() {
    entries= groups=
    for one in "$home"/jobs/*; do
        user= group=
        [ ! -e "$one" ] || read -r user group <"$one"
        case $user in
        0) continue ;;
        '' | *[!0-9]*) groups="unknown unknown"; entries=unknown; break ;;
        esac
        case $entries, in *",u:$user:rx,"*) ;; *) entries="$entries,u:$user:rx" ;; esac
        case " $groups " in *" ${group:-unknown} "*) ;; *) groups="$groups ${group:-unknown}" ;; esac
    done
    ! setfacl --set "u::rwx,g::---,o::---,m::rx$entries" "$home/pipe" 2>/dev/null || return 0
    # Without access control lists: the group of the job, or everybody if there are several.
    set -- $groups
    case $#,${1:-} in
    0,*) chmod 700 "$home/pipe" ;;
    *,unknown) chmod 711 "$home/pipe" ;;
    1,*) chgrp "$1" "$home/pipe" && chmod 710 "$home/pipe" ;;
    *) chmod 711 "$home/pipe" ;;
    esac
}

# End the daemon of $home and restore the compute mode of the GPU.
stop_daemon() {
    ask get_server_list >/dev/null
    case $? in
    0)
        # Its servers get 30 s to let their clients end.
        ask "quit -t 30" 60 >/dev/null
        tries=0
        while ask get_server_list >/dev/null; do
            tries=$((tries + 1))
            [ "$tries" -lt 40 ] || break
            sleep 0.5
        done
        ;;
    124) say "the MPS daemon of $home hangs: it is ended by a signal" ;;
    esac
    end_by_signals || { say "the MPS daemon of $home does not end"; return 1; }
    ! ask get_server_list >/dev/null || { say "the MPS daemon of $home does not quit"; return 1; }
    # Files that are still open there must not be in the way of the next daemon.
    rm -rf "$home/pipe" || return 1
    if [ -s "$home/mode" ]; then
        nvidia-smi -i "$(cat "$home/uuid")" -c "$(cat "$home/mode")" >/dev/null || return 1
        rm -f "$home/mode"
    fi
}

mkdir -p -m 755 "$state" || exit 1
# Anybody who can open a lock can hold it, and a job could drain the node.
(umask 077; : >>"$state/lock") && chmod 600 "$state/lock" || exit 1
exec 9>"$state/lock"
flock -w 120 9 || { say "another prolog or epilog holds the lock"; exit 1; }
"""

_PROLOG: Final = """\
#!/bin/sh
# Written by gpushare: Prolog of slurmd. Starts the MPS daemon of the GPU that a job with --gres=mps was given.
@COMMON@
# The UUID of a GPU with MPS, or with shards, by the number that Slurm gives it: its place in Slurm's list of GPUs, which is
# not the N of /dev/nvidiaN. Where slurmd knows the UUID, it gives that.
with_mps() {
    case $1 in
@CASES@
    *) return 1 ;;
    esac
}
with_shards() {
    case $1 in
@SHARDS@
    *) return 1 ;;
    esac
}

# The UUIDs of the numbers ($2) that are GPUs with_mps or with_shards ($1).
uuids_of() { for number in $(echo "$2" | tr , ' '); do "$1" "$number"; done | sort -u | paste -s -d , -; }

# The numbers of the GPUs of one gres ($1), as slurmctld lists what the job has on this node: mps:60(IDX:1), or since 23.11
# mps:60(0/100,60/100), of each GPU. Asked only where the environment does not tell.
numbers_of() {
    told=$(timeout 10 scontrol -d -o show job "$SLURM_JOB_ID" 2>/dev/null </dev/null | sed 's/ Nodes=/\\n/g' |
        while read -r nodes rest; do
            case $nodes in "${SLURMD_NODENAME:-}" | "${SLURM_JOB_NODELIST:-}") echo "$rest" ;; esac
        done | sed -n "s/.* GRES=\\([^ ]*,\\)\\{0,1\\}$1:[^(]*(\\([^)]*\\)).*/\\2/p")
    case $told in
    IDX:*) echo "${told#IDX:}" ;;
    *) echo "$told" | tr , '\\n' | sed -n '/^[1-9].*\\//=' | while read -r place; do echo $((place - 1)); done ;;
    esac
}

# Pinned memory limit of each client process of a GPU, and how the daemon prints it.
limit_of() {
    case $1 in
@LIMITS@
    *) echo ;;
    esac
}

limit_memory() {
    ask "set_default_device_pinned_mem_limit 0 $1" >/dev/null
    # A wrong value is taken without an error.
    held=$(ask 'get_default_device_pinned_mem_limit 0')
    [ "$held" = "$2" ] || { say "the MPS daemon of GPU $uuid has the memory limit '$held' instead of $1"; return 1; }
}

start_daemon() {
    mkdir -p -m 755 "$home/log" "$home/jobs" || return 1
    echo "$uuid" >"$home/uuid"
    ask get_server_list >/dev/null
    case $? in
    0) return 0 ;;
    124)
        say "the MPS daemon of GPU $uuid hangs"
        # Restart it only if it has no jobs.
        [ -z "$(ls -A "$home/jobs")" ] || return 1
        ;;
    esac
    end_by_signals || { say "an earlier MPS daemon of GPU $uuid does not end"; return 1; }
    rm -rf "$home/pipe" && mkdir -m 700 "$home/pipe" || return 1
    if [ ! -s "$home/mode" ]; then
        case $(nvidia-smi -i "$uuid" --query-gpu=compute_mode --format=csv,noheader) in
        Default) echo DEFAULT >"$home/mode" ;;
        Exclusive_Process) echo EXCLUSIVE_PROCESS >"$home/mode" ;;
        *) say "the compute mode of GPU $uuid is unknown"; return 1 ;;
        esac
    fi
    nvidia-smi -i "$uuid" -c EXCLUSIVE_PROCESS >/dev/null || return 1
    # Without the lock: the daemon outlives this script. Without the percentage: that is one job's.
    env -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_VISIBLE_DEVICES="$uuid" CUDA_MPS_PIPE_DIRECTORY="$home/pipe" \\
        CUDA_MPS_LOG_DIRECTORY="$home/log" nvidia-cuda-mps-control -d 9>&- </dev/null >/dev/null 2>&1
    tries=0
    until ask get_server_list >/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 40 ] || { say "the MPS daemon of GPU $uuid does not start"; return 1; }
        sleep 0.5
    done
    limit=$(limit_of "$uuid")
    [ -z "$limit" ] || limit_memory $limit
}

note_job() {
    echo "$SLURM_JOB_UID ${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID" 2>/dev/null)}" >"$home/jobs/$SLURM_JOB_ID"
}

status=0
if [ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ]; then
    for program in nvidia-cuda-mps-control nvidia-smi; do
        command -v "$program" >/dev/null || { say "$program not found in $PATH"; exit 1; }
    done
    # Without this the job would run without its limit.
    [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || { say "the job has a share of MPS and no GPU"; exit 1; }
fi
if [ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ]; then
    # Each is of one gres of the job, most often of the last in its list: of mps or of shard, because Slurm gives no job with
    # mps a whole GPU.
    numbers=$CUDA_VISIBLE_DEVICES,${SLURM_JOB_GPUS:-},${GPU_DEVICE_ORDINAL:-}
    gpus=$(uuids_of with_mps "$numbers") shards=$(uuids_of with_shards "$numbers")
    if [ -z "$gpus$shards" ]; then
        say "Slurm gives a job a share of MPS on GPU $CUDA_VISIBLE_DEVICES, which has no MPS in this script: compare it with slurmd -G"
        exit 1
    fi
    [ -n "$gpus" ] || gpus=$(uuids_of with_mps "@MPS@")
    [ -n "$shards" ] || shards=$(uuids_of with_shards "@SHARD@")
    if [ -z "$gpus" ]; then
        # The job runs without it and is told: the order of a job's gres must not drain the node.
        say "Slurm does not say which GPU has the share of MPS of job $SLURM_JOB_ID"
        echo "- $shards" >"$state/job-$SLURM_JOB_ID"
    fi
else
    gpus=$(uuids_of with_mps "${CUDA_VISIBLE_DEVICES:-}")
fi
for uuid in $(echo "$gpus" | tr , ' '); do
    home=$state/$uuid
    if [ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ]; then
        if start_daemon && note_job && let_in; then
            echo "$uuid $shards" >"$state/job-$SLURM_JOB_ID"
        else
            rm -f "$home/jobs/$SLURM_JOB_ID"
            # Restore the compute mode; Slurm drains the node and queues the job again.
            [ -n "$(ls -A "$home/jobs")" ] || stop_daemon
            status=1
        fi
    elif [ -d "$home" ]; then
        # A whole GPU: a daemon that an epilog could not end would still hold it.
        stop_daemon || status=1
    fi
done
exit $status
"""

_EPILOG: Final = """\
#!/bin/sh
# Written by gpushare: Epilog of slurmd. Ends the MPS daemon of a GPU with the last job that used it.
@COMMON@
status=0
for home in "$state"/GPU-*; do
    [ -e "$home/jobs/$SLURM_JOB_ID" ] || continue
    rm -f "$home/jobs/$SLURM_JOB_ID"
    if [ -n "$(ls -A "$home/jobs")" ]; then
        let_in || status=1
    else
        stop_daemon || status=1
    fi
done
rm -f "$state/job-$SLURM_JOB_ID"
exit $status
"""

_TASK_PROLOG: Final = """\
#!/bin/sh
# Written by gpushare: TaskProlog of slurmd. Tells each task of an MPS job where its daemon listens.
# The daemon renumbers its one GPU, so the task names it by UUID too.
[ -r "@STATE@/job-${SLURM_JOB_ID:-}" ] || exit 0
# A step without a share of MPS keeps the GPU or shard that Slurm gave it.
[ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ] || exit 0
read -r uuid shards <"@STATE@/job-$SLURM_JOB_ID"
if [ "$uuid" = - ]; then
    echo "print gpushare: Slurm does not say which GPU has this job's share of MPS, so it runs without it; put mps last: --gres=shard:1,mps:10"
    echo "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    # By Slurm's number it could be the GPU with MPS: that counts the devices of one gres.
    [ -z "$shards" ] || echo "export CUDA_VISIBLE_DEVICES=$shards"
    exit 0
fi
if [ -n "${SLURM_SHARDS_ON_NODE:-}" ]; then
    # A program is a client of MPS or not: it cannot use both. Slurm refuses typed gres (shard:t4:1) in steps.
    echo "print gpushare: this step has a share of MPS and a shard, and its tasks use the share of MPS; for the shard: srun --gres=shard:1"
    [ -z "$shards" ] || echo "export GPUSHARE_SHARD_DEVICES=$shards"
fi
echo "export CUDA_MPS_PIPE_DIRECTORY=@STATE@/$uuid/pipe"
echo "export CUDA_VISIBLE_DEVICES=$uuid"
"""


def prolog(gpus: Mapping[int, str], shards: Mapping[int, str], limits: Mapping[str, int]) -> str:
    """Return the Prolog: UUIDs by Slurm's number of the GPUs with MPS and with shards; memory limits (bytes) by UUID."""
    text = _PROLOG.replace("@COMMON@", _COMMON)
    for words, gres, uuids in (("CASES", "MPS", gpus), ("SHARDS", "SHARD", shards)):
        cases = "".join(f"    {number} | {uuid}) echo {uuid} ;;\n" for number, uuid in sorted(uuids.items()))
        # Where one GPU only has it, it is that: slurmctld need not be asked.
        numbers = ",".join(map(str, uuids)) if len(uuids) < 2 else f"$(numbers_of {gres.lower()})"
        text = text.replace(f"@{words}@\n", cases).replace(f"@{gres}@", numbers)
    held = [f"    {uuid}) echo {mps_memory(limit)} {mps_memory_readback(limit)} ;;" for uuid, limit in limits.items()]
    text = text.replace("@LIMITS@\n", "".join(f"{line}\n" for line in held))
    return text.replace("@STATE@", STATE)


def epilog() -> str:
    return _EPILOG.replace("@COMMON@", _COMMON).replace("@STATE@", STATE)


def task_prolog() -> str:
    """Return the TaskProlog: a Prolog's own environment never reaches the job."""
    return _TASK_PROLOG.replace("@STATE@", STATE)


DETECTIONS: Final = ("nvml", "off")
# 100 per GPU: Slurm gives a job max(1, asked * 100 / Count) percent of the threads.
MPS_COUNT: Final = 100
_SLICES: Final = re.compile(r"(?:\d+c\.)?(\d+)g\.", re.ASCII)


def slurm_export(host: HostDescription, *, autodetect: str | None = None) -> Export:
    """Return the files.

    ``autodetect`` nvml lets slurmd find GPUs and MIG devices (the default with MIG); off lists every device.
    """
    if autodetect not in {None, *DETECTIONS}:
        raise BadUsage(
            f"'{str(autodetect)[:40]}' is not a way to detect GPUs", "give nvml or off", code="bad_autodetect"
        )
    _check(host)
    has_mig = any(gpu.sharing is Sharing.MIG for gpu in host.gpus)
    by_nvml = has_mig if autodetect is None else autodetect == "nvml"
    with_mps = [gpu for gpu in host.gpus if gpu.sharing is Sharing.MPS]
    documents = [
        Document(name="gres.conf", text=_gres(host, by_nvml=by_nvml), kind="conf"),
        Document(name="slurm.conf.lines", text=_lines(host, by_nvml=by_nvml), kind="conf"),
        Document(name="cgroup.conf.lines", text=_CGROUP, kind="conf"),
    ]
    if with_mps:
        order = list(enumerate(slurm_order(host, by_nvml=by_nvml)))
        uuids, shards = (
            {number: device.gpu.uuid for number, device in order if device.gpu.sharing is sharing}
            for sharing in (Sharing.MPS, Sharing.TIMESLICE)
        )
        limits = {
            gpu.uuid: gpu.mps.limits.memory_limit_bytes
            for gpu in with_mps
            if gpu.mps is not None and gpu.mps.limits.memory_limit_bytes is not None
        }
        documents += [
            Document(name="gpushare-prolog.sh", text=prolog(uuids, shards, limits), kind="sh"),
            Document(name="gpushare-epilog.sh", text=epilog(), kind="sh"),
            Document(name="gpushare-task-prolog.sh", text=task_prolog(), kind="sh"),
        ]
    return Export(
        documents=tuple(documents),
        commands=tuple(_commands(with_mps=bool(with_mps))),
        needs=tuple(_needs(host, by_nvml=by_nvml)),
        lost=tuple(_lost(host)),
    )


def type_of(gpu: GpuDescription, mig: MigDescription | None = None, *, by_nvml: bool = False) -> str:
    """Return the Type of a device: ``t4``; of a MIG device the driver's whole name with the profile.

    Where slurmd detects devices (``by_nvml``) it does not use the profile's name, but makes one from the slices of the GPU
    instance and its memory in whole GiB, rounded: 1g.18gb of an H200 is nvidia_h200_1g.16gb, and 3g.40gb of an A100
    ..._3g.39gb (gpu_nvml.c, _handle_mig). What slurm.conf says must be a part of that.
    """
    if mig is None:
        return short_model(gpu.name) or "gpu"
    name = re.sub(r"\s+", "_", (gpu.name or "gpu").strip().lower())
    slices = _SLICES.match(mig.profile)
    if not by_nvml or slices is None or mig.memory_total_bytes is None:
        return f"{name}_{mig.profile}"
    # Half a GiB is rounded up, as roundl does.
    return f"{name}_{slices[1]}g.{(mig.memory_total_bytes + GIB // 2) // GIB}gb"


class SlurmDevice(NamedTuple):
    """A device as a record of gres/gpu, with its Type."""

    type: str
    gpu: GpuDescription
    mig: MigDescription | None = None


_CGROUP: Final = """\
# Written by gpushare: cgroup.conf needs this line. Without it a job can use all GPUs of the node: a MIG job the other
# instances, and any job those that MPS serves.
ConstrainDevices=yes
"""


def _by_minor(host: HostDescription, *, by_nvml: bool) -> list[SlurmDevice]:
    """Return the records of gres/gpu in the order of gres.conf."""
    return [
        SlurmDevice(type_of(gpu, mig, by_nvml=by_nvml), gpu, mig)
        for gpu in sorted(host.gpus, key=lambda gpu: gpu.minor or 0)
        for mig in (gpu.mig if gpu.sharing is Sharing.MIG else (None,))
    ]


def slurm_order(host: HostDescription, *, by_nvml: bool) -> list[SlurmDevice]:
    """Return the devices in Slurm's order: a job's GPUs are numbered by their place in it, whatever their files are.

    Without detection it is the order of the types in the Gres of slurm.conf, and in one type that of gres.conf
    (_merge_config in src/interfaces/gres.c; seen with slurmctld 22.05 and 24.11). With NVML first the GPUs in the order of their PCI
    bus ids, then the MIG devices by file (_merge_system_gres_conf in gres_gpu.c).
    """
    devices = _by_minor(host, by_nvml=by_nvml)
    if by_nvml:
        return sorted(
            devices,
            key=lambda one: (one.mig is not None, (one.gpu.minor or 0) if one.mig else one.gpu.index),
        )
    types = _types(devices)
    return sorted(devices, key=lambda one: list(types).index(one.type))


def _types(devices: Iterable[SlurmDevice]) -> Counter[str]:
    """Return how many devices each type has, in the order for slurm.conf.

    MIG devices come last, because Slurm 22.05 counts each of their files as a device of gres/mps.
    """
    return Counter(one.type for one in sorted(devices, key=lambda one: one.mig is not None))


def _check(host: HostDescription) -> None:
    for gpu in host.gpus:
        if gpu.minor is None:
            raise NotSupported(
                f"the device number of GPU {gpu.index} is unknown",
                "see why: gpushare doctor",
                gpu=str(gpu.index),
                code="no_minor",
            )
        if gpu.sharing is Sharing.MIG and not gpu.mig:
            raise NotSupported(
                f"GPU {gpu.index} is in MIG mode without any MIG device, so Slurm could not hand it out",
                f"make some: gpushare mig apply -g {gpu.index} 1g*7; or: gpushare mig disable -g {gpu.index}",
                gpu=str(gpu.index),
                code="no_device",
            )
    for gpu, mig in host.instances():
        if mig.mps is not None or mig.replicas:
            what = "MPS" if mig.mps is not None else "shards"
            raise NotSupported(
                f"Slurm has no {what} on a MIG device ({mig.profile} of GPU {gpu.index}): the File of mps and shard must be a GPU",
                "gpushare export dra can, and gpushare export docker, compose and cdi",
                code="sharing_on_mig",
            )


def _gres(host: HostDescription, *, by_nvml: bool) -> str:
    """Return gres.conf. Records of shared resources name the File of a gpu record."""
    lines = ["# Written by gpushare: gres.conf of this node.", f"AutoDetect={'nvml' if by_nvml else 'off'}"]
    gpus = sorted(host.gpus, key=lambda gpu: gpu.minor or 0)
    if not by_nvml:
        for gpu in gpus:
            lines += _devices(gpu)
    for gpu in gpus:
        if gpu.sharing is Sharing.TIMESLICE:
            lines.append(f"Name=shard Count={gpu.replicas or DEFAULT_REPLICAS} File=/dev/nvidia{gpu.minor}")
        elif gpu.sharing is Sharing.MPS:
            lines.append(f"Name=mps Count={MPS_COUNT} File=/dev/nvidia{gpu.minor}")
    return "\n".join(lines) + "\n"


def _devices(gpu: GpuDescription) -> list[str]:
    if gpu.sharing is not Sharing.MIG:
        return [f"Name=gpu Type={type_of(gpu)} File=/dev/nvidia{gpu.minor}"]
    lines = []
    for mig in gpu.mig:
        if mig.capabilities is None:
            raise NotSupported(
                f"the capability nodes of {mig.uuid or f'{mig.profile} of GPU {gpu.index}, which does not exist yet,'} are unknown",
                "let slurmd find them: --autodetect nvml" + ("" if mig.uuid else "; or first: gpushare apply -f FILE"),
                gpu=str(gpu.index),
                code="no_capabilities",
            )
        nodes = [f"/dev/nvidia{gpu.minor}", *(f"/dev/nvidia-caps/nvidia-cap{one}" for one in mig.capabilities)]
        lines.append(f"Name=gpu Type={type_of(gpu, mig)} MultipleFiles={','.join(nodes)}")
    return lines


def _lines(host: HostDescription, *, by_nvml: bool) -> str:
    # In the order of slurm_order.
    types = _types(_by_minor(host, by_nvml=by_nvml))
    shards = mps = 0
    for gpu in host.gpus:
        shards += (gpu.replicas or DEFAULT_REPLICAS) if gpu.sharing is Sharing.TIMESLICE else 0
        mps += MPS_COUNT if gpu.sharing is Sharing.MPS else 0
    shared = [f"mps:{mps}"] * bool(mps) + [f"shard:{shards}"] * bool(shards)
    names = ["gpu", *(one.partition(":")[0] for one in shared)]
    gres = ",".join([*(f"gpu:{kind}:{number}" for kind, number in types.items()), *shared])
    lines = ["# Written by gpushare: put these lines into slurm.conf, the same on every node."]
    lines.append(f"GresTypes={','.join(names)}")
    if shared:
        lines.append("SelectType=select/cons_tres")
    lines += [
        "# With ConstrainDevices=yes in cgroup.conf: a task can open the devices of its job only.",
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup,task/affinity",
        "# Only with slurmdbd, without which slurmctld does not start with it:",
        "#AccountingStorageTRES=" + ",".join(f"gres/{name}" for name in names),
    ]
    if by_nvml and any(gpu.mig for gpu in host.gpus):
        lines += ["# MIG devices report no utilization, and a slurmd that asks for it blocks every MIG change."]
        lines += ["JobAcctGatherParams=DisableGPUAcct"]
    if mps:
        lines += [
            "# At the allocation, not at the first step.",
            "PrologFlags=Alloc",
            "Prolog=/etc/slurm/gpushare-prolog.sh",
            "Epilog=/etc/slurm/gpushare-epilog.sh",
            "TaskProlog=/etc/slurm/gpushare-task-prolog.sh",
        ]
    lines += ["# Put Gres into the node's own line, which also has its CPUs and memory."]
    if mps and len(types) > 1 and not by_nvml:
        lines += ["# Keep the order of the types: the numbers in the prolog follow it."]
    lines += [f"NodeName={host.node or 'NODE'} Gres={gres}"]
    return "\n".join(lines) + "\n"


def _commands(*, with_mps: bool) -> list[str]:
    scripts = "gpushare-prolog.sh gpushare-epilog.sh gpushare-task-prolog.sh"
    return [
        "sudo install -m 644 gres.conf /etc/slurm/gres.conf",
        *([f"sudo install -m 755 -t /etc/slurm {scripts}"] if with_mps else []),
        "put slurm.conf.lines into slurm.conf (GresTypes, SelectType, TaskPlugin and Prolog may already be there: merge them)",
        "put cgroup.conf.lines into /etc/slurm/cgroup.conf",
        "sudo slurmd -G",
        "sudo systemctl restart slurmctld; on the node: sudo systemctl restart slurmd",
        "scontrol show node, and look for Gres=",
    ]


def _needs(host: HostDescription, *, by_nvml: bool) -> list[str]:
    needs = [
        "required: ConstrainDevices=yes in cgroup.conf, and TaskPlugin=task/cgroup: without them a job can use the GPUs of the others"
    ]
    if by_nvml:
        needs.append("a slurmd built with NVML; otherwise --autodetect off")
    if any(gpu.sharing is Sharing.MIG for gpu in host.gpus):
        needs += ["MIG instances created before slurmd starts; units of gpushare export systemd keep that order"]
        if by_nvml and _named_by_memory(host):
            needs.append(
                "--gres with slurmd's own type names: it names MIG devices by their memory, not by their profile"
            )
        needs += [] if by_nvml else ["a new gres.conf after every MIG change: the capability numbers change"]
    if any(gpu.sharing is Sharing.MPS for gpu in host.gpus):
        needs += [
            "no MPS daemon of gpushare on these GPUs: gpushare mps stop -g all; Slurm starts one for its jobs",
            "setfacl (package acl): without it the daemon of a job is open to the job's group, not to its user alone",
            "one GPU with MPS per job and node, which is Slurm's default (no MULTIPLE_SHARING_GRES_PJ)",
        ]
        if not by_nvml:
            needs.append(
                f"the GPUs in the order {_files(host)} in slurmd -G: the prolog knows them by their place in it"
            )
        if any(gpu.sharing is Sharing.TIMESLICE for gpu in host.gpus):
            needs.append("jobs that ask for mps or for shard: the tasks of a step with both use the share of MPS only")
    return needs


def _files(host: HostDescription) -> str:
    devices = slurm_order(host, by_nvml=False)
    return ", ".join(dict.fromkeys(f"/dev/nvidia{one.gpu.minor}" for one in devices))


def _named_by_memory(host: HostDescription) -> bool:
    return any(type_of(gpu, mig, by_nvml=True) != type_of(gpu, mig) for gpu, mig in host.instances())


def _lost(host: HostDescription) -> list[str]:
    lost = []
    ways = {gpu.sharing for gpu in host.gpus}
    if Sharing.TIMESLICE in ways:
        if any(gpu.sharing is Sharing.TIMESLICE and gpu.replicas is None for gpu in host.gpus):
            lost.append(
                f"the host does not know how many programs share a GPU: {DEFAULT_REPLICAS} assumed; choose with --replicas N"
            )
        lost.append("isolation: shard only counts jobs; it limits neither memory nor threads")
    if any(gpu.time_slice not in {None, TimeSlice.DEFAULT} for gpu in host.gpus):
        lost.append("the slice length: Slurm does not set it; gpushare export systemd does, at boot")
    if Sharing.MPS in ways:
        lost.append("the thread limit of the daemon: Slurm sets one per job; --gres=mps:25 is 25 %")
        lost.append("several users at once: an MPS server serves one user; jobs of others wait for it")
    if any(gpu.mps is not None and gpu.mps.limits.priority for gpu in host.gpus):
        lost.append("low priority: Slurm sets no priority")
    if any(mig.name for _, mig in host.instances()):
        lost.append("instance names: Slurm uses types")
    return lost
