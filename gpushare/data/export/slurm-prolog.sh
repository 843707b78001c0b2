#!/bin/sh
# Written by gpushare: Prolog of slurmd. Starts the MPS daemon of the GPU that a job with --gres=mps was given.
@{COMMON}
# The UUID of a GPU with MPS, or with shards, by the number that Slurm gives it: its place in Slurm's list of GPUs, which is
# not the N of /dev/nvidiaN. Where slurmd knows the UUID, it gives that.
with_mps() {
    case $1 in
@{CASES}    *) return 1 ;;
    esac
}
with_shards() {
    case $1 in
@{SHARDS}    *) return 1 ;;
    esac
}

# The UUIDs of the numbers ($2) that are GPUs with_mps or with_shards ($1).
uuids_of() { for number in $(echo "$2" | tr , ' '); do "$1" "$number"; done | sort -u | paste -s -d , -; }

# The numbers of the GPUs of one gres ($1), as slurmctld lists what the job has on this node: mps:60(IDX:1), or since 23.11
# mps:60(0/100,60/100), of each GPU. Asked only where the environment does not tell.
numbers_of() {
    told=$(timeout 10 scontrol -d -o show job "$SLURM_JOB_ID" 2>/dev/null </dev/null | sed 's/ Nodes=/\n/g' |
        while read -r nodes rest; do
            case $nodes in "${SLURMD_NODENAME:-}" | "${SLURM_JOB_NODELIST:-}") echo "$rest" ;; esac
        done | sed -n "s/.* GRES=\([^ ]*,\)\{0,1\}$1:[^(]*(\([^)]*\)).*/\2/p")
    case $told in
    IDX:*) echo "${told#IDX:}" ;;
    *) echo "$told" | tr , '\n' | sed -n '/^[1-9].*\//=' | while read -r place; do echo $((place - 1)); done ;;
    esac
}

# Pinned memory limit of each client process of a GPU, and how the daemon prints it.
limit_of() {
    case $1 in
@{LIMITS}    *) echo ;;
    esac
}

limit_memory() {
    ask "set_default_device_pinned_mem_limit 0 $1" >/dev/null
    # A wrong value is taken without an error.
    held=$(ask 'get_default_device_pinned_mem_limit 0')
    [ "$held" = "$2" ] || { say "the MPS daemon of GPU $uuid has the memory limit '$held' instead of $1"; return 1; }
}

start_daemon() {
    # shellcheck disable=SC2174 # umask 022 is for those above
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
    env -u CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_VISIBLE_DEVICES="$uuid" CUDA_MPS_PIPE_DIRECTORY="$home/pipe" \
        CUDA_MPS_LOG_DIRECTORY="$home/log" nvidia-cuda-mps-control -d 9>&- </dev/null >/dev/null 2>&1
    tries=0
    until ask get_server_list >/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 40 ] || { say "the MPS daemon of GPU $uuid does not start"; return 1; }
        sleep 0.5
    done
    limit=$(limit_of "$uuid")
    # shellcheck disable=SC2086 # the limit, and how the daemon prints it
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
    [ -n "$gpus" ] || gpus=$(uuids_of with_mps "@{MPS}")
    [ -n "$shards" ] || shards=$(uuids_of with_shards "@{SHARD}")
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
