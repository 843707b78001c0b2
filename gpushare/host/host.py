"""One host: its NVML, programs, processes, and the directories of gpushare."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpushare.base.errors import NoPermission, or_none
from gpushare.base.values import dataclass
from gpushare.host.capabilities import Capabilities
from gpushare.host.nvml import NvmlReader
from gpushare.host.process import Processes
from gpushare.host.program import Programs
from gpushare.host.smi import ComputePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpushare.base.model import GpuProcess
    from gpushare.host.channels import ChannelControl
    from gpushare.host.checkpoint import Checkpoint
    from gpushare.host.machine import Machine
    from gpushare.host.origin import Origin

SYSTEM_RUN_DIRECTORY = Path("/run/gpushare")
SYSTEM_STATE_DIRECTORY = Path("/var/lib/gpushare")
# Where the run directories of users are: see `local_run_directory`.
TEMPORARY = "/tmp"  # noqa: S108 - opened as a stranger's directory
RUNTIME = "/run/user"


def loaded_at_call(path: str, *arguments: Any) -> Callable[..., Any]:
    """Return a function that calls ``FILE:NAME``, with these arguments first; the file is loaded only at a call."""

    def call(*more: Any, **named: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(import_module(f"gpushare.{module}"), name)(*arguments, *more, **named)

    return call


class UserDirectory(NamedTuple):
    """The run directory of a user. ``owner`` is who its files belong to: that user, or on a simulated host this one."""

    uid: int
    path: Path
    owner: int


def _no_directories() -> Sequence[UserDirectory]:
    """Return no directories: only root looks into those of other users."""
    return ()


# The module of NVIDIA's vGPU host driver; a look at it costs no call of NVML.
_VGPU_MODULE = "/sys/module/nvidia_vgpu_vfio"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, real or simulated.

    ``run_directory`` has our MPS daemons and undo records. ``shared_run_directories`` are those of others that this user may
    use (root's). ``state_directory`` survives reboots; ``shared_state_directories`` are those of others. ``uid`` is
    the user that commands run as.
    """

    spec: str
    nvml: NvmlReader
    programs: Programs
    processes: Processes
    capabilities: Capabilities
    run_directory: Path
    state_directory: Path
    uid: int
    # Whether this user may do what only root may; on a simulated host every user may, to try it.
    root: bool
    machine: Machine = field(default_factory=loaded_at_call("host.machine:Machine"))
    # Opens what reads and sets the time-slices of processes, and pauses them; used as a context.
    open_channels: Callable[[], ChannelControl] = field(default=loaded_at_call("host.channels:ChannelControl"))
    # What copies the GPU memory of processes to host memory and back.
    open_checkpoint: Callable[[], Checkpoint] = field(default=loaded_at_call("host.checkpoint:Checkpoint"))
    # Returns whether this is a hypervisor that may give vGPUs to virtual machines.
    makes_vgpus: Callable[[], bool] = field(default=lambda: os.path.isdir(_VGPU_MODULE))
    # Returns the user, the groups, the cgroup and the command line of a PID.
    origin: Callable[[int], Origin | None] = field(default=loaded_at_call("host.origin:origin_of"))
    # Returns the run directories of the other users: root reads what they have paused and swapped, and writes nothing there.
    user_directories: Callable[[], Sequence[UserDirectory]] = field(default=_no_directories)
    shared_run_directories: Sequence[Path] = field(default=())
    shared_state_directories: Sequence[Path] = field(default=())

    @property
    def run_directories(self) -> tuple[Path, ...]:
        """Return the run directories in which this user finds daemons and jobs: this user's, then root's."""
        return (self.run_directory, *self.shared_run_directories)

    @property
    def policy(self) -> ComputePolicy:
        return ComputePolicy(self.programs)

    @property
    def is_simulated(self) -> bool:
        return self.spec.startswith("sim:")


def processes_on(host: Host, index: int) -> tuple[GpuProcess, ...] | None:
    """Return the processes on a GPU; None: it does not answer, or NVML's PIDs are of a different namespace from ours."""
    if host.processes.namespace_is_host() is False:
        return None
    return or_none(lambda: host.nvml.processes(index))


def local_host(user_directories: Callable[[], Sequence[UserDirectory]] = _no_directories) -> Host:
    """Return this machine. ``user_directories`` returns those of the other users, into which only root looks."""
    uid = os.geteuid()
    run_directory = local_run_directory(uid)
    state_directory = local_state_directory(uid)
    shared = () if run_directory == SYSTEM_RUN_DIRECTORY else (SYSTEM_RUN_DIRECTORY,)
    shared_state = () if state_directory == SYSTEM_STATE_DIRECTORY else (SYSTEM_STATE_DIRECTORY,)
    return Host(
        spec="local",
        nvml=NvmlReader(),
        programs=Programs(),
        processes=Processes(),
        capabilities=Capabilities(),
        run_directory=run_directory,
        state_directory=state_directory,
        uid=uid,
        root=uid == 0,
        user_directories=user_directories if uid == 0 else _no_directories,
        shared_run_directories=shared,
        shared_state_directories=shared_state,
    )


def local_run_directory(uid: int) -> Path:
    """Return the directory of a user's daemons and records.

    ``GPUSHARE_RUN_DIR``; ``/run/gpushare`` for root; else ``/tmp/gpushare-UID``. XDG_RUNTIME_DIR does not count: the
    directory is the same with and without a login session (ssh, cron, ``sudo -u``, a service), and outlives the session, as
    jobs do; systemd removes ``/run/user/UID`` at the last logout. If this user cannot have the name in ``/tmp``, as when
    another user has made it first, the directory is in ``/run/user/UID``, or else in the state directory. Short, because a
    pipe directory may have 87 bytes.
    """
    explicit = os.environ.get("GPUSHARE_RUN_DIR")
    if explicit:
        return Path(explicit).absolute()
    if uid == 0:
        return SYSTEM_RUN_DIRECTORY
    places = _run_directory_places(uid)
    # First where there is one already, as that has the records: even if a better place has become free since.
    for is_usable in (_belongs_to, _may_own):
        for place in places:
            if is_usable(place, uid):
                return Path(place)
    return Path(places[0])


def _run_directory_places(uid: int) -> list[str]:
    """Return where the run directory of a user may be, in the order of `local_run_directory`."""
    return [f"{TEMPORARY}/gpushare-{uid}", f"{RUNTIME}/{uid}/gpushare", str(local_state_directory(uid) / "run")]


def _belongs_to(place: str, uid: int) -> bool:
    try:
        return os.lstat(place).st_uid == uid
    except OSError:
        return False


def _may_own(place: str, uid: int) -> bool:
    """Return whether an absolute path is the user's, or this user (``uid``) can make a directory there."""
    if os.path.lexists(place):
        return _belongs_to(place, uid)
    parent = os.path.dirname(place)
    # The parents of a state directory in the home directory may not exist yet.
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK | os.X_OK)


def local_state_directory(uid: int) -> Path:
    """Return the directory of what survives a reboot, like names.

    ``GPUSHARE_STATE_DIR``; ``/var/lib/gpushare`` for root; ``$XDG_STATE_HOME/gpushare``, or
    ``~/.local/state/gpushare``.
    """
    explicit = os.environ.get("GPUSHARE_STATE_DIR")
    if explicit:
        return Path(explicit).absolute()
    if uid == 0:
        return SYSTEM_STATE_DIRECTORY
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification wants a relative one ignored.
    if os.path.isabs(state):
        return Path(state) / "gpushare"
    return home_directory() / ".local" / "state" / "gpushare"


def home_directory() -> Path:
    """Return the user's home; without HOME and an entry in passwd, Debian's path for "no home directory"."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def _make_directories(path: Path, mode: int) -> None:
    """Create a directory and its parents with this mode, whatever the umask; existing ones stay as they are.

    Only the run directory of a plain user is closed to others, like systemd's in ``/run/user``, so that no other user reaches
    the daemons in it.
    """
    is_run_directory = os.geteuid() != 0 and str(path) in _run_directory_places(os.geteuid())
    own_mode = 0o700 if is_run_directory else mode
    try:
        path.mkdir(own_mode)
    except FileNotFoundError:
        _make_directories(path.parent, mode)
        _make_directories(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(own_mode)


def make_private_directory(path: Path, mode: int = 0o755, *, variable: str = "GPUSHARE_RUN_DIR") -> None:
    """Create a directory (and its parents) that only its owner may write.

    The MPS daemon would create it with mode 0777, without a sticky bit. An existing directory must be ours or root's, and
    not writable for others: its pipe decides who reaches which GPU. ``variable`` is the one that moves it.

    Raises:
        NoPermission: it cannot be created, belongs to another user, or others may write into it.
    """
    try:
        _make_directories(path, mode)
        target, itself = path.stat(), path.lstat()
    except OSError as error:
        short = "short " if variable == "GPUSHARE_RUN_DIR" else ""
        raise NoPermission(
            f"cannot create the directory {path}: {error.strerror}",
            f"make room (df -h), or set {variable} to a {short}directory that you may write",
            code="directory_unwritable",
        ) from None
    # Through a link another user could choose where our files go.
    strangers = {target.st_uid, itself.st_uid} - {os.geteuid(), 0}
    if strangers:
        raise NoPermission(
            f"the directory {path} belongs to user {strangers.pop()}",
            f"set {variable} to a directory of your own",
            code="wrong_owner",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise NoPermission(
            f"the directory {path} is not writable", f"run as its owner, or set {variable}", code="directory_unwritable"
        )
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not target.st_mode & stat.S_ISVTX:
        raise NoPermission(
            f"the directory {path} is writable for others (mode {stat.S_IMODE(target.st_mode):o})",
            f"close it: chmod go-w {shlex.quote(str(path))}",
            code="directory_open",
        )


def is_trusted_directory(directory: Path, *below: str) -> bool:
    """Return whether files in a directory can be trusted: `make_private_directory` could have made it.

    ``directory`` is a run or state directory, and ``below`` the path from there. Each directory on the way, and any link
    in its place, must belong to this user or root and not be writable for others. O_NOFOLLOW checks only the last name.
    """
    trusted = {os.geteuid(), 0}
    for path in itertools.accumulate((str(directory), *below), os.path.join):
        try:
            stated = os.lstat(path)
            if stat.S_ISLNK(stated.st_mode) and stated.st_uid in trusted:
                stated = os.stat(path)
        except OSError:
            return False
        others_may_write = stated.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stated.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(stated.st_mode) or stated.st_uid not in trusted or others_may_write:
            return False
    return True


def ending_hint(host: Host, pid: int) -> str:
    """Return how to end a process by hand; if it is another user's, whom to ask."""
    info = host.processes.describe(pid)
    # The end of PID 1 would end all others too.
    if pid == 1 or info is None:
        return f"see what it is: ps -fp {pid}"
    if info.uid == host.uid:
        return f"end it: kill {pid}"
    return f"ask {info.user or 'its owner'} to end it; see: ps -fp {pid}"
