"""``gpushare --install-completion``: copy the completion of the user's shell, which comes with the package, to its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from gpushare.base.errors import BadUsage, OperationFailed
from gpushare.base.package import package_text
from gpushare.host.host import home_directory


class _Shell(NamedTuple):
    """A shell: its completion in the package, its place below the user's directory, and what is still to be done."""

    source: str
    user: str
    next_step: str = ""


_SHELLS: Final[Mapping[str, _Shell]] = {
    "bash": _Shell(
        "gpushare.bash",
        "bash-completion/completions/gpushare",
        "without the package bash-completion, add to ~/.bashrc: source {file}",
    ),
    "zsh": _Shell(
        "_gpushare",
        "zsh/site-functions/_gpushare",
        "add to ~/.zshrc, before compinit: fpath=({directory} $fpath)",
    ),
    "fish": _Shell("gpushare.fish", "fish/completions/gpushare.fish"),
}


def install() -> str:
    """Copy the completion of ``$SHELL`` for this user, and return the message that says so."""
    name = Path(os.environ.get("SHELL", "")).name
    shell = _SHELLS.get(name)
    if shell is None:
        raise BadUsage(
            f"no completion for the shell {name or '(SHELL is not set)'}",
            "set SHELL: SHELL=bash gpushare --install-completion; or zsh, or fish",
            code="unknown_shell",
        )
    target = _user_directory(name) / shell.user
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            # To write through it would change the file of an installation, or fail if that is gone.
            target.unlink()
        target.write_text(package_text(f"completions/{shell.source}"), encoding="utf-8")
    except OSError as error:
        raise OperationFailed(
            f"cannot write {target}: {error.strerror or error}", "check the directory", code="not_written"
        ) from None
    step = shell.next_step.format(file=target, directory=target.parent)
    return f"wrote {target}\n" + (f"{step}\n" if step else "") + "start a new shell to use it\n"


def _user_directory(shell: str) -> Path:
    """Return the directory below which a shell looks for this user's completions: of data, or for fish of configuration."""
    if shell == "fish":
        given = os.environ.get("XDG_CONFIG_HOME", "")
        default = ".config"
    else:
        given = os.environ.get("XDG_DATA_HOME", "")
        default = ".local/share"
    # The XDG specification ignores a relative path.
    return Path(given) if os.path.isabs(given) else home_directory() / default
