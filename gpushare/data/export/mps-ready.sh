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
echo "$2" >"${CUDA_MPS_PIPE_DIRECTORY%/pipe}/@{LIMIT}"
if [ "$4" != - ]; then
    ask "set_default_client_priority $4" >/dev/null
    same "client priority" "$4" "$(ask get_default_client_priority)"
fi
