"""`gpushare run --container`: a program in a container of Podman or Docker, with all that a share gives a process.

The engine's client (`podman run`, `docker run`) is our child; the container's processes are not. So the program of the share
is the container's first process, by its PID on the host: its limits, the proof that it is attached, slices, pauses and the
safe end are those of any other program. The guard knows both.

Facts: podman-run(1) and docker run have --cidfile, -e NAME (the value from the client's environment) and --ipc=host, and pass
the signals of the client on to the container; `inspect --format {{.State.Pid}}` prints the PID on the host. The first process
of a PID namespace ignores signals that it does not handle (pid_namespaces(7)); the engines' --init helps.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from gpushare.base.errors import BadUsage, NotFound, NotSupported
from gpushare.base.values import dataclass
from gpushare.host.host import Host, make_private_directory
from gpushare.part import Part, Watch
from gpushare.run.plain import PlainWatch
from gpushare.run.share import Share, check_program

PODMAN: Final = "podman"
DOCKER: Final = "docker"
ENGINES: Final = (PODMAN, DOCKER)
_ID: Final = re.compile(r"[0-9a-f]{64}")
_SHORT_ID: Final = re.compile(r"[0-9a-f]{12,64}")
# Between two questions whether it runs; the engine may have to pull the image first.
_POLL_SECONDS: Final = 0.1
_INSPECT_SECONDS: Final = 10.0
_PIPE: Final = "CUDA_MPS_PIPE_DIRECTORY"
# The daemon's, not the client's.
_LOG: Final = "CUDA_MPS_LOG_DIRECTORY"


def check_engine(name: str) -> str:
    """Return the name of an engine that is installed.

    Raises:
        BadUsage: no engine has this name.
        NotFound: the engine is not installed.
    """
    if name not in ENGINES:
        raise BadUsage(
            f"--container {name[:40]} is not an engine", "give --container podman or docker", code="bad_engine"
        )
    try:
        check_program(name)
    except NotFound as error:
        hint = f"install {name}; or run it without a container: gpushare run -- CMD"
        raise error.restated(message=f"{name} is not installed", hint=hint) from None
    return name


def is_foreign(engine: str, uid: int) -> bool:
    """Return whether the containers of an engine are not ours to touch: Docker's daemon, which is root's, starts them."""
    return engine == DOCKER and uid != 0


def check_not_foreign(engine: str, uid: int, action: str) -> None:
    """Raise if only root may do something with a container of this engine."""
    if is_foreign(engine, uid):
        raise NotSupported(
            f"{action} of a container of docker needs root: its daemon starts the processes, and they are not yours to touch",
            "run as root: sudo gpushare run --container docker ...; or use --container podman, which starts them as you",
            code="container_needs_root",
        )


# Options of podman run and docker run that take no value; all others take one, after = or as the next word.
_FLAGS: Final = frozenset((
    "detach", "disable-content-trust", "env-host", "help", "init", "interactive", "no-healthcheck", "no-hostname", "no-hosts",
    "oom-kill-disable", "privileged", "publish-all", "quiet", "read-only", "replace", "rm", "rmi", "rootfs", "tls-verify",
    "tty", "use-api-socket",
))  # fmt: skip
_LETTERS: Final = {"d": "detach", "i": "interactive", "t": "tty", "P": "publish-all", "q": "quiet"}


def options_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options in ``[OPTIONS] IMAGE [CMD]`` as the engine reads them, each with its value.

    A flag has its long name, and the value ``true`` unless it was given one; ``-e`` is ``env``, other letters stay.
    """
    options = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            has_value = bool(equals)
        else:
            # Flags may stand together before another letter: -it, -ieNAME=VALUE.
            letters = word[1:]
            while letters[:1] in _LETTERS:
                options.append((_LETTERS[letters[0]], "true"))
                letters = letters[1:]
            name = "env" if letters[:1] == "e" else letters[:1]
            value = letters[1:].removeprefix("=")
            has_value = bool(letters[1:])
        if not name:
            continue
        if name in _FLAGS and not has_value:
            value = "true"
        elif not has_value:
            value = rest.pop(0) if rest else ""
        options.append((name, value))
    return options


def check_options(words: Sequence[str], share_variables: Collection[str]) -> None:
    """Raise BadUsage if ``[OPTIONS] IMAGE [CMD]`` takes the container away from gpushare, or sets a variable of the share."""
    for name, value in options_of(words):
        is_off = value.lower() in {"false", "f", "0"}
        variable, equals, _ = value.partition("=")
        if (name == "detach" and not is_off) or (name == "rm" and is_off):
            raise BadUsage(
                f"--{name}{'=false' if is_off else ''}: gpushare run ends with its container, and removes it",
                "leave it out; to run it in the background: gpushare run --container ENGINE -- IMAGE CMD &",
                code="bad_container_option",
            )
        if name == "env" and equals and variable in share_variables:
            raise BadUsage(
                f"--env {variable}: gpushare sets it for the share, and the container's own value would take its place",
                "leave it out; limits: --threads 25 --memory 4G",
                code="bad_container_option",
            )


def ask_engine(engine: str, *words: str, seconds: float = _INSPECT_SECONDS) -> str | None:
    """Return what a command of an engine prints; None: it fails, or does not end in time."""
    try:
        done = subprocess.run(
            [engine, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def engine_of(container: str) -> str | None:
    """Return the engine that has a container of this id; None: it cannot be an id, or no engine here knows it."""
    if not _SHORT_ID.fullmatch(container):
        return None
    for engine in ENGINES:
        # Not its name, which may look like an id.
        identity = ask_engine(engine, "container", "inspect", "--format", "{{.Id}}", container)
        if identity is not None and identity.startswith(container):
            return engine
    return None


def stop_container(engine: str, container: str, grace_seconds: float) -> None:
    """Let an engine stop a container, which it kills after the grace. Whether it did is for the caller to see."""
    whole = math.ceil(grace_seconds)
    ask_engine(engine, "stop", "-t", str(whole), container, seconds=whole + _INSPECT_SECONDS)


@dataclass
class Container(Part):
    """The container that a job runs in: a part of it. The engine's client is started with what `command` returns."""

    host: Host
    share: Share
    engine: str
    _identity: str | None = None

    @property
    def _file(self) -> Path:
        """Return the file to which the engine writes the container's id."""
        return self.host.run_directory / "containers" / f"{os.getpid()}.cid"

    @property
    def is_foreign(self) -> bool:
        """Return whether only root may signal the container's processes."""
        return is_foreign(self.engine, self.host.uid)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command of the engine's client for ``[OPTIONS] IMAGE [CMD]``."""
        check_options(words, self.share.environment({}).keys())
        flags = ["--rm", "--interactive", "--cidfile", str(self._file), *self._device_options(), *self._mps_options()]
        variables = [word for name in self._passed_variables() for word in ("-e", name)]
        return [self.engine, "run", *flags, *variables, *words]

    def _passed_variables(self) -> list[str]:
        """Return the names of the variables that the container gets: CUDA's of the share, and MPS's own of the caller.

        Other variables of the caller (CUDA_HOME) mean paths of this host, as the log directory of MPS does.
        """
        of_share = {name for name in self.share.environment({}) if name.startswith("CUDA_")}
        of_caller = {name for name in self.share.environment(os.environ) if name.startswith("CUDA_MPS_")}
        return sorted((of_share | of_caller) - {_LOG})

    def _device_options(self) -> list[str]:
        """Return the options that give the container the device of the share."""
        if self.host.is_simulated:
            # There is no GPU that a container could be given.
            return []
        uuid = self.share.device.uuid
        return ["--gpus", f"device={uuid}"] if self.engine == DOCKER else ["--device", f"nvidia.com/gpu={uuid}"]

    def _mps_options(self) -> list[str]:
        """Return the options that make the container a client of the MPS daemon, if the share has one."""
        pipe = self.share.environment({}).get(_PIPE)
        if self.share.meter is None or pipe is None:
            return []
        if re.search(r"[\s,:]", pipe):
            raise NotSupported(
                f"the pipe directory {pipe} cannot be mounted into a container",
                "set GPUSHARE_RUN_DIR to a path without blanks, commas and colons",
                code="bad_path",
            )
        # Unlike -v, --mount refuses a source that does not exist: the container would run without MPS.
        flags = ["--ipc=host", "--mount", f"type=bind,source={pipe},target={pipe}"]
        # An MPS server serves one user: root in a container of rootless Podman is that user already.
        return [*flags, "--user", f"{os.getuid()}:{os.getgid()}"] if self.is_foreign else flags

    def check(self) -> None:
        check_engine(self.engine)

    def open(self) -> None:
        """Make the directory of the file for the container's id; remove an old file, which the engine would not write over."""
        make_private_directory(self.host.run_directory)
        make_private_directory(self._file.parent)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()

    def client_watch(self, pid: int) -> Watch:
        """Return the watch over the engine's client, until the container runs."""
        return _ClientWatch(self.host, self.share.device, pid)

    def first_process(self) -> int | None:
        """Return the PID of the container's first process on the host; None: it does not run (yet)."""
        identity = self._read_identity()
        text = None
        if identity is not None:
            text = ask_engine(self.engine, "inspect", "--format", "{{.State.Pid}}", identity)
        return int(text) if text is not None and text.isdecimal() and int(text) > 1 else None

    def _read_identity(self) -> str | None:
        """Return the id of the container, which its engine has written to our file; None: not yet."""
        if self._identity is None:
            with contextlib.suppress(OSError):
                text = self._file.read_text(encoding="utf-8").strip()
                self._identity = text if _ID.fullmatch(text) else None
        return self._identity

    def close(self, *, program_lives: bool = False) -> None:
        """Remove a container that is still there although its client has ended: --rm has not if the client was killed."""
        identity = self._read_identity()
        if identity is not None and not program_lives:
            ask_engine(self.engine, "rm", "--force", identity)
            self._identity = None
        with contextlib.suppress(OSError):
            self._file.unlink()


class _ClientWatch(PlainWatch):
    """The watch over an engine's client, which is on no GPU: nothing is known until the container runs."""

    def poll_interval(self) -> float:
        """Return the seconds between two questions to the engine whether the container runs."""
        return _POLL_SECONDS

    def find_processes(self) -> None:
        """Do nothing: the client is on no GPU."""
