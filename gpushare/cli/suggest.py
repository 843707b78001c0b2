"""What a wrong word of a command line was meant to be. Loaded only for an error of the parser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from gpushare.cli.help import path_of

# The options that a word may mean: the first that the command has; "A or B" needs both.
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "--mem": ("--memory",),
    "--memory-limit": ("--memory",),
    "--sm": ("--threads", "--sms"),
    "--sms": ("--threads", "--sm"),
    "--limit": ("--threads or --memory",),
    "--percent": ("--threads",),
    "--gpus": ("--gpu",),
    "--device": ("--gpu",),
    "--force": ("--evict", "--destroy"),
    "--interval": ("--watch",),
    "--profile": ("--mig",),
    "--replicas": ("--copies",),
}
# Words that mean the same everywhere.
_ANYWHERE: Final[Mapping[str, str]] = {
    **{f"--{form}": f"-o {form}" for form in ("json", "yaml", "csv", "table", "plain")},
    "--format": "--output",
}
# By group; "" is the program.
_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        **dict.fromkeys(("list", "ls", "show"), "status"),
        **dict.fromkeys(("ps", "queue"), "jobs"),
        **dict.fromkeys(("watch", "monitor"), "status -w"),
        **dict.fromkeys(("delete", "destroy", "remove", "rm"), "mig destroy"),
        "create": "mig create",
        "start": "mps start",
        **dict.fromkeys(("kill", "end"), "stop"),
        "log": "logs",
        "limit": "mps set",
        **dict.fromkeys(("kubernetes", "k8s"), "export k8s"),
        **{
            name: f"export {name}"
            for name in ("slurm", "docker", "compose", "ecs", "systemd", "prometheus", "karpenter")
        },
        **dict.fromkeys(("recommend", "suggest"), "advise"),
        "check": "doctor",
    },
    "mps": {
        **dict.fromkeys(("list", "ls", "ps", "show", "top"), "status"),
        **dict.fromkeys(("delete", "quit"), "stop"),
        "create": "start",
        "limit": "set",
        "log": "logs",
    },
    "mig": {
        **dict.fromkeys(("list", "ls", "ps", "show"), "status"),
        **dict.fromkeys(("delete", "remove", "rm"), "destroy"),
        "add": "create",
        "set": "apply",
        "on": "enable",
        "off": "disable",
    },
    "timeslice": dict.fromkeys(("list", "ls", "status"), "show"),
    "export": {"kubernetes": "k8s", "parted": "mig-parted"},
    "sim": {"ls": "list", "ps": "show", "status": "show", **dict.fromkeys(("delete", "clear"), "reset")},
}
# Never suggested: --yes would skip a question, --help would run no command.
_NEVER: Final = frozenset(("--yes", "--help", "--version", "--debug"))
# How alike two words have to be, from 0 to 1.
_ALIKE: Final = 0.78


def meant_option(word: str, options: Iterable[str]) -> str | None:
    """Return the option that a word was meant to be, of those a command has; None if none is near."""
    if word in _ANYWHERE:
        return _ANYWHERE[word]
    candidates = [name for name in options if name.startswith("--") and name not in _NEVER]
    for name in _OPTIONS.get(word, ()):
        if set(name.split(" or ")) <= set(candidates):
            return name
    # The beginning of an option: three letters at least, or it could be any.
    completions = [name for name in candidates if len(word) > 4 and name.startswith(word)]
    return completions[0] if len(completions) == 1 else _nearest_word(word, candidates)


def _nearest_word(word: str, candidates: Sequence[str]) -> str | None:
    matches = get_close_matches(word[:60], candidates, n=1, cutoff=_ALIKE)
    return matches[0] if matches else None


def meant_word(error: Any) -> str | None:
    """Return what the unknown option or command in a parser's error was meant to be; None: nothing is near."""
    context = getattr(error, "ctx", None)
    if context is None:
        return None
    if type(error).__name__ == "NoSuchOption":
        return meant_option(
            error.option_name, (name for parameter in context.command.params for name in parameter.opts)
        )
    # `options.Group` adds it.
    word = getattr(error, "unknown_command", None)
    if word is None:
        return None
    synonyms = _COMMANDS.get(path_of(context), {})
    return synonyms.get(word.lower()) or _nearest_word(word.lower(), context.command.list_commands(context))
