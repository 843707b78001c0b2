"""Prolog, epilog and task prolog for gres/mps, as shell scripts. Pure.

Slurm's own sample (etc/prolog.example) gives the number of the GPU as the compute mode, quits a daemon without saying
which, compares lists of GPUs as text (wrong from 10 on), keeps one GPU in mind, asks by arguments (which the program
ignores before driver 580), and never tells the job where the daemon listens. These scripts keep one daemon per GPU with
its own directory, name GPUs by UUID, ask through stdin, check every answer, and fail (Slurm drains the node) rather
than leave a job without the daemon it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STATE: Final = "/run/gpushare-slurm"

_COMMON: Final = """\
set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
state=@STATE@
umask 022

say() { echo "gpushare: $*" >&2; logger -t gpushare-slurm "$*" 2>/dev/null || :; }

# One command to the daemon of $home. Exit code: 0 answered, 1 nobody listens, 124 it hangs.
ask() { echo "$1" | CUDA_MPS_PIPE_DIRECTORY="$home/pipe" timeout "${2:-10}" nvidia-cuda-mps-control 2>/dev/null; }

# End the daemon of $home and give the GPU its compute mode back.
stop_daemon() {
    ask get_server_list >/dev/null
    case $? in
    0)
        # Its servers get 30 s to let their clients end.
        ask "quit -t 30" 60 >/dev/null
        tries=0
        while ask get_server_list >/dev/null; do
            tries=$((tries + 1))
            [ "$tries" -lt 40 ] || { say "the MPS daemon of $home does not quit"; return 1; }
            sleep 0.5
        done
        ;;
    124) say "the MPS daemon of $home hangs"; return 1 ;;
    esac
    if [ -s "$home/mode" ]; then
        nvidia-smi -i "$(cat "$home/uuid")" -c "$(cat "$home/mode")" >/dev/null || return 1
        rm -f "$home/mode"
    fi
}

mkdir -p -m 755 "$state" || exit 1
# Whoever can open a lock can hold it: a job would drain the node.
(umask 077; : >>"$state/lock") && chmod 600 "$state/lock" || exit 1
exec 9>"$state/lock"
flock -w 120 9 || { say "another prolog or epilog holds the lock"; exit 1; }
"""

_PROLOG: Final = """\
#!/bin/sh
# Written by gpushare: Prolog of slurmd. Starts the MPS daemon of the GPU that a job with --gres=mps was given.
@COMMON@
# The UUID of a GPU by the number that Slurm gives, which is that of /dev/nvidiaN; with Flags=env_uuid it is the UUID.
uuid_of() {
    case $1 in
@CASES@
    *) return 1 ;;
    esac
}

# Pinned memory that each client process of a GPU may have.
limit_of() {
    case $1 in
@LIMITS@
    *) echo ;;
    esac
}

start_daemon() {
    mkdir -p -m 755 "$home/pipe" "$home/log" "$home/jobs" || return 1
    echo "$uuid" >"$home/uuid"
    ask get_server_list >/dev/null
    case $? in
    0) return 0 ;;
    124) say "the MPS daemon of GPU $uuid hangs"; return 1 ;;
    esac
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
    [ -z "$limit" ] || ask "set_default_device_pinned_mem_limit 0 $limit" >/dev/null
}

status=0
for id in $(echo "${CUDA_VISIBLE_DEVICES:-}" | tr , ' '); do
    uuid=$(uuid_of "$id") || continue
    home=$state/$uuid
    if [ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ]; then
        if start_daemon; then
            : >"$home/jobs/$SLURM_JOB_ID"
            echo "$uuid" >"$state/job-$SLURM_JOB_ID"
        else
            # The GPU gets its compute mode back; Slurm drains the node and queues the job again.
            stop_daemon
            status=1
        fi
    elif [ -d "$home" ]; then
        # A whole GPU: what an epilog could not end would still hold it.
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
    [ -n "$(ls -A "$home/jobs")" ] || stop_daemon || status=1
done
rm -f "$state/job-$SLURM_JOB_ID"
exit $status
"""

_TASK_PROLOG: Final = """\
#!/bin/sh
# Written by gpushare: TaskProlog of slurmd. Tells each task of an MPS job where its daemon listens.
# The daemon numbers its one GPU anew, so the task names it by UUID too.
[ -r "@STATE@/job-${SLURM_JOB_ID:-}" ] || exit 0
uuid=$(cat "@STATE@/job-$SLURM_JOB_ID")
echo "export CUDA_MPS_PIPE_DIRECTORY=@STATE@/$uuid/pipe"
echo "export CUDA_VISIBLE_DEVICES=$uuid"
"""


def prolog(gpus: Mapping[int, str], limits: Mapping[str, str]) -> str:
    """Return the Prolog: UUIDs by minor number, and memory limits (``3840M``) by UUID, of the GPUs with MPS."""
    cases = [f"    {minor} | {uuid}) echo {uuid} ;;" for minor, uuid in sorted(gpus.items())]
    held = [f"    {uuid}) echo {limit} ;;" for uuid, limit in limits.items()]
    text = _PROLOG.replace("@COMMON@", _COMMON).replace("@CASES@", "\n".join(cases))
    text = text.replace("@LIMITS@\n", "".join(f"{line}\n" for line in held))
    return text.replace("@STATE@", STATE)


def epilog() -> str:
    """Return the Epilog."""
    return _EPILOG.replace("@COMMON@", _COMMON).replace("@STATE@", STATE)


def task_prolog() -> str:
    """Return the TaskProlog: a Prolog's own environment never reaches the job."""
    return _TASK_PROLOG.replace("@STATE@", STATE)
