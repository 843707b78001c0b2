"""``gpushare --install-completion``: copy the completion of the user's shell, which comes with the package, to its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpushare.base.errors import BadUsage, NotFound, OperationFailed
from gpushare.base.values import dataclass
from gpushare.host.host import home_directory


@dataclass(frozen=True)
class _Shell:
    # In this repository, in an installation, and below the user's directory of data or configuration.
    source: str
    shared: str
    user: str
    # What is still to be done, if anything.
    next_step: str


_SHELLS: Final[Mapping[str, _Shell]] = {
    "bash": _Shell(
        "gpushare.bash",
        "share/bash-completion/completions/gpushare",
        "bash-completion/completions/gpushare",
        "without the package bash-completion, add to ~/.bashrc: source {file}",
    ),
    "zsh": _Shell(
        "_gpushare",
        "share/zsh/site-functions/_gpushare",
        "zsh/site-functions/_gpushare",
        "add to ~/.zshrc, before compinit: fpath=({directory} $fpath)",
    ),
    "fish": _Shell(
        "gpushare.fish",
        "share/fish/vendor_completions.d/gpushare.fish",
        "fish/completions/gpushare.fish",
        "",
    ),
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
    text = _completion_text(shell)
    target = _user_directory(name) / shell.user
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            # To write through it would change the file of an installation, or fail if that is gone.
            target.unlink()
        target.write_text(text, encoding="utf-8")
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


def _completion_text(shell: _Shell) -> str:
    """Return the completion of a shell, from a checkout or from this installation."""
    import sysconfig

    user = sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))
    places = [
        Path(__file__).resolve().parents[2] / "completions" / shell.source,
        *(Path(prefix) / shell.shared for prefix in (sys.prefix, user, "/usr/local", "/usr")),
    ]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise NotFound(
        "this installation has no completions",
        "install it with pip, in a checkout: pip install .",
        code="no_completions",
    )
