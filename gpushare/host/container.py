"""The container of a process, recognised in its ``/proc/PID/cgroup``."""

from __future__ import annotations

import re
from typing import Final

# The text of a process in 16 hierarchies; whoever may make cgroups nests them as deep as he likes.
_MOST_CHARACTERS: Final = 64 << 10
# systemd's scopes, and the same where containerd was given a cgroup without systemd.
_SCOPE: Final = r"(?:docker|libpod|cri-containerd|crio|containerd|nerdctl)[-:]([0-9a-f]{12,64})(?=\.scope|$)"
# A directory whose name is an id.
_ID: Final = r"[0-9a-f]{32,64}"
_JOB: Final = r"job_[0-9]{1,20}"


def container_of(cgroup: str) -> str | None:
    """Return the container that a ``/proc/PID/cgroup`` text names, short id or name, or None.

    Knows Docker, Podman, containerd and CRI-O (with Kubernetes pods), LXC, and Slurm's ``job_N``;
    cgroup v1 and v2. None means that the process is in none of them.
    """
    # Taken apart at the slashes: one regular expression for all of it is cubic in the length of a path.
    for line in cgroup[:_MOST_CHARACTERS].split("\n"):
        found = _named_in(line.split("/"))
        if found is not None:
            return found
    return None


def _named_in(names: list[str]) -> str | None:
    """Return the container that the directories of one cgroup name, the outermost; what stands before them is first."""
    last_id = max((at for at, name in enumerate(names) if re.fullmatch(_ID, name)), default=0)
    last_job = max((at for at, name in enumerate(names) if re.match(_JOB, name)), default=0)
    for at, name in enumerate(names):
        if at > 0:
            # Docker, Kubernetes and others with cgroupfs, below any parent.
            parent = name in {"docker", "lxc"} or (name.startswith("kubepods") and ":" not in name)
            if parent and last_id > at:
                return names[last_id][:12]
            if len(name) == 64 and re.fullmatch(_ID, name):
                return name[:12]
            lxc = _lxc(name, names[at + 1] if at + 1 < len(names) else "")
            if lxc:
                return lxc
            if "slurm" in name and last_job > at:
                job = re.match(_JOB, names[last_job])
                return job and job.group()
        scope = re.search(_SCOPE, name)
        if scope is not None:
            return scope.group(1)[:12]
    return None


def _lxc(name: str, inside: str) -> str:
    """Return the LXC container that a directory names, or the one inside it; empty: none."""
    if name in {"lxc", "lxc.payload"}:
        return inside
    return name.removeprefix("lxc.payload.").removeprefix("lxc.") if name.startswith("lxc.") else ""
