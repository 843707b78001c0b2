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

# One value of what the kernel says of a process.
field() {
    while read -r key value rest; do
        [ "$key" != "$2:" ] || { echo "$value"; return 0; }
    done <"/proc/$1/status"
} 2>/dev/null

# PID:START of a process that has not ended: a PID alone may soon be another's.
identity() {
    line=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- "$1" ${line##*)}
    [ "$2" != Z ] && echo "$1:${21}"
}

is_mps() {
    { read -r name <"/proc/$1/comm"; } 2>/dev/null || return 1
    case $name in nvidia-cuda-mps*) return 0 ;; *) return 1 ;; esac
}

# The daemon of $home, which runs as this user with that directory, and the servers below it. Not by its PID file, which
# everybody may write.
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

# End what is left of the daemon of $home.
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

# Let the users of the jobs of $home talk to its daemon, and nobody else: whoever may connect can keep it from answering.
# The directory stays root's: the daemon would follow a link that its owner put there.
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
    # Without access control lists: the group of the job, or everybody where there are several.
    set -- $groups
    case $#,${1:-} in
    0,*) chmod 700 "$home/pipe" ;;
    *,unknown) chmod 711 "$home/pipe" ;;
    1,*) chgrp "$1" "$home/pipe" && chmod 710 "$home/pipe" ;;
    *) chmod 711 "$home/pipe" ;;
    esac
}

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
            [ "$tries" -lt 40 ] || break
            sleep 0.5
        done
        ;;
    124) say "the MPS daemon of $home hangs: it is ended by a signal" ;;
    esac
    end_by_signals || { say "the MPS daemon of $home does not end"; return 1; }
    ! ask get_server_list >/dev/null || { say "the MPS daemon of $home does not quit"; return 1; }
    # What somebody holds open there must not be in the way of the next one.
    rm -rf "$home/pipe" || return 1
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
    mkdir -p -m 755 "$home/log" "$home/jobs" || return 1
    echo "$uuid" >"$home/uuid"
    ask get_server_list >/dev/null
    case $? in
    0) return 0 ;;
    124)
        say "the MPS daemon of GPU $uuid hangs"
        # Nobody loses it but the jobs that it has.
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
    [ -z "$limit" ] || ask "set_default_device_pinned_mem_limit 0 $limit" >/dev/null
}

note_job() {
    echo "$SLURM_JOB_UID ${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID" 2>/dev/null)}" >"$home/jobs/$SLURM_JOB_ID"
}

status=0
for id in $(echo "${CUDA_VISIBLE_DEVICES:-}" | tr , ' '); do
    uuid=$(uuid_of "$id") || continue
    home=$state/$uuid
    if [ -n "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" ]; then
        if start_daemon && note_job && let_in; then
            echo "$uuid" >"$state/job-$SLURM_JOB_ID"
        else
            rm -f "$home/jobs/$SLURM_JOB_ID"
            # The GPU gets its compute mode back; Slurm drains the node and queues the job again.
            [ -n "$(ls -A "$home/jobs")" ] || stop_daemon
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
