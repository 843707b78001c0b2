set -u
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# slurmd starts it without PATH: what is not exported is not known to timeout and env.
export PATH
state=@{STATE}
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
    # shellcheck disable=SC2086 # its fields
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
        # shellcheck disable=SC2015 # either must hold
        is_mps "$pid" && [ "$(field "$pid" Uid)" = "$(id -u)" ] || continue
        tr '\0' '\n' 2>/dev/null <"$one/environ" | grep -qxF "CUDA_MPS_PIPE_DIRECTORY=$home/pipe" || continue
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
            # shellcheck disable=SC2086 # several PIDs
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
    entries='' groups=''
    for one in "$home"/jobs/*; do
        user='' group=''
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
    # shellcheck disable=SC2086 # each is an argument
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

# shellcheck disable=SC2174 # umask 022 is for those above
mkdir -p -m 755 "$state" || exit 1
# Anybody who can open a lock can hold it, and a job could drain the node.
(umask 077; : >>"$state/lock") && chmod 600 "$state/lock" || exit 1
exec 9>"$state/lock"
flock -w 120 9 || { say "another prolog or epilog holds the lock"; exit 1; }
