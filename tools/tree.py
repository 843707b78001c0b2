"""The command tree of gpushare as plain data, read from Typer's objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Names of types differ between versions of Typer.
_TYPES = {"str": "TEXT", "int": "NUMBER", "integer": "NUMBER"}


@dataclass(frozen=True)
class Option:
    """One option: its names, ``metavar`` None for a flag, and its help."""

    names: tuple[str, ...]
    metavar: str | None
    help: str
    multiple: bool = False

    @property
    def valued(self) -> bool:
        """Return whether the next word is its value; of one like ``[SECS]`` it may be."""
        return self.metavar is not None and not self.metavar.startswith("[")

    @property
    def long(self) -> str:
        """Return its longest name."""
        return max(self.names, key=len)


@dataclass(frozen=True)
class Argument:
    """One positional argument."""

    name: str
    help: str
    required: bool
    many: bool


@dataclass(frozen=True)
class Node:
    """The program, a group of commands, or a command."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]
    children: tuple[Node, ...]

    @property
    def title(self) -> str:
        """Return the words of the command, without the program's name."""
        return " ".join(self.path)

    @property
    def short_help(self) -> str:
        """Return the first sentence of its help."""
        paragraph = " ".join(self.help.split("\n\n")[0].split())
        return paragraph.split(". ")[0].rstrip(".")

    def walk(self) -> Iterator[Node]:
        """Yield the node and all below it, in the order of ``--help``."""
        yield self
        for child in self.children:
            yield from child.walk()


def command_tree() -> Node:
    """Return the tree of the program, without hidden options and commands."""
    from gpushare.cli import root

    return _node(root(), ())


def _node(command: Any, path: tuple[str, ...]) -> Node:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    children = command.children().items() if hasattr(command, "children") else ()
    options = [_option(parameter) for parameter in shown if parameter.param_type_name == "option"]
    return Node(
        path=path,
        help=(command.help or "").strip(),
        options=(*options, Option(("-h", "--help"), None, "Show the help and exit.")),
        arguments=tuple(_argument(parameter) for parameter in shown if parameter.param_type_name == "argument"),
        children=tuple(_node(child, (*path, name)) for name, child in children if not child.hidden),
    )


def _option(parameter: Any) -> Option:
    flag = parameter.is_flag or parameter.count
    return Option(
        names=(*parameter.opts, *parameter.secondary_opts),
        metavar=None if flag else parameter.metavar or _TYPES.get(parameter.type.name, parameter.type.name.upper()),
        help=" ".join((parameter.help or "").split()),
        multiple=parameter.multiple or bool(parameter.count),
    )


def _argument(parameter: Any) -> Argument:
    return Argument(
        name=parameter.metavar or parameter.name.upper(),
        help=" ".join((parameter.help or "").split()),
        required=parameter.required,
        many=parameter.nargs == -1,
    )
