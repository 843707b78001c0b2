"""Text for output: one line stays one line, and nothing in it can drive the terminal."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Collection
from typing import IO, Final

# Control characters, line separators, lone surrogates (undecodable bytes of a command line) and the
# bidirectional marks and overrides: a process may have any of them in its name.
# Compiled at the first use: JSON of a host needs neither.
_UNSAFE: Final = r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
# JSON has escaped the others, and keeps its own line breaks.
_UNSAFE_IN_JSON: Final = r"[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SURROGATES: Final = r"[\ud800-\udfff]"
# The characters that gpushare draws, in ASCII of the same width.
_ASCII: Final = str.maketrans({"─": "-", "…": "~", "→": ">", "·": "-", "\u2013": "-"})


# Where fewer characters are left for text, lines are longer than the screen is wide.
_NARROWEST: Final = 20


def _escape(match: re.Match[str]) -> str:
    r"""Return a character as Python writes it in a string: ``\n``, ``\x1b``, ``\u202e``."""
    character = match.group()
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def visible(text: str) -> str:
    """Return text with every character escaped that would break the line or drive the terminal."""
    return re.sub(_UNSAFE, _escape, text)


def safe_json(text: str) -> str:
    """Return JSON with the characters escaped that drive a terminal but are no control characters in JSON (U+009B)."""
    if text.isascii() and "\x7f" not in text:
        return text
    return re.sub(_UNSAFE_IN_JSON, lambda match: f"\\u{ord(match.group()):04x}", text)


# Where a command begins in a text.
_COMMAND_BEGINS: Final = r"(?:^|(?<=[:;,$] )|(?<=&& )|(?<=\|\| )|(?<=\()|(?<=\bor )|(?<=\bthen ))"
# Where sudo looks for programs (secure_path in sudoers): as in RHEL 8 and 9, and what Debian and Arch add. Only root may read
# sudoers.
_SUDO_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
_SUDO_PATH_BUT_RHEL: Final = "/usr/local/sbin:/usr/local/bin"
_RHEL: Final = "/etc/redhat-release"

# Who types on a simulated host is who the simulation says.
_simulated = False
# ``--host SPEC`` for the commands of gpushare in the text, if the user gave it, and what finds these commands.
_host_option = ""
_own_command = ""


def set_host(spec: str | None, verbs: Collection[str], *, simulated: bool) -> None:
    """Say which ``--host`` the commands (of these verbs) need in the text from now on, and whether that host is simulated."""
    global _simulated, _host_option, _own_command  # noqa: PLW0603
    _simulated = simulated
    _host_option = "" if spec is None else f"--host {shlex.quote(spec)}"
    # Up to the verb, before which the option goes.
    _own_command = rf"{_COMMAND_BEGINS}(?:sudo )?gpushare (?=(?:{'|'.join(verbs)})(?![\w-]))"


def complete_commands(text: str) -> str:
    """Return a text with the commands of gpushare as this user has to type them.

    They have the ``--host`` that the user gave. After sudo, root needs no sudo, and others may need a path: pipx puts
    gpushare in ~/.local/bin, and a virtual environment is not on root's path at all: there sudo would find none, or another
    one. On a simulated host sudo stays as it is.
    """
    if _host_option and "gpushare" in text:
        text = re.sub(_own_command, lambda match: f"{match.group()}{_host_option} ", text)
    this_program = os.path.abspath(sys.argv[0])
    if _simulated or "sudo gpushare" not in text or os.path.basename(this_program) != "gpushare":
        return text
    if os.geteuid() == 0:
        return text.replace("sudo gpushare", "gpushare")
    from shutil import which

    # Fedora has this file too, and finds more: a full path is right there, only longer.
    path = _SUDO_PATH if os.path.exists(_RHEL) else f"{_SUDO_PATH_BUT_RHEL}:{_SUDO_PATH}"
    found_by_sudo = which("gpushare", path=path)
    if found_by_sudo is not None and os.path.realpath(found_by_sudo) == os.path.realpath(this_program):
        return text
    return text.replace("sudo gpushare", f"sudo {shlex.quote(this_program)}")


def one_line(text: str) -> str:
    """Return a message as one line, a space for each line break, with its commands as the user has to type them."""
    return visible(re.sub(r"\s*[\r\n\u2028\u2029]\s*", " ", complete_commands(text).strip()))


def paragraphs(text: str) -> str:
    """Return `visible` text, but keep line breaks and tabs."""
    return re.sub(r"[^\n\t]+", lambda match: visible(match.group()), text)


# A command in a text: it begins a part of a sentence, and ends with it. Quotes may contain what would end it.
_COMMAND: Final = (
    _COMMAND_BEGINS + r"""(?:sudo [a-z][\w-]*|gpushare|nvidia-smi|docker|kubectl) """
    r"""(?:'[^']*'|"[^"]*"|(?!, | \()[^;)'"])*"""
)
_QUOTED: Final = r"""'[^']*'|"[^"]*\""""
# Stand-ins for a blank and a line break inside a command, where no line may be broken; `visible` leaves neither in a text.
_BLANK: Final = "\x00"
_BREAK: Final = "\x01"


def wrapped(text: str, width: int, first: str = "", rest: str = "", *, command: bool = False) -> list[str]:
    """Return text as lines that fit a width, between words only; ``first`` and ``rest`` begin the lines.

    A command in the text can be copied: it is on one line if it fits into one; else each line of it but the last ends with
    a backslash. ``command``: all of the text is a command.
    """
    room = max(width - max(len(first), len(rest)), _NARROWEST)
    # In a sentence, a bracket and a comma may follow the command.
    longest_command = room if command else room - 2

    def keep_together(match: re.Match[str]) -> str:
        """Return a command that fits a line with stand-ins for its blanks; else its lines with stand-ins for their breaks."""
        line: str = re.sub(_QUOTED, lambda quoted: quoted.group().replace(" ", _BLANK), match.group())
        if len(line) <= longest_command:
            return line.replace(" ", _BLANK)
        if not command and " -" not in line:
            # Too long, and without an option: it is a sentence about gpushare.
            return line
        return f"{_BLANK}\\{_BREAK}".join(part.replace(" ", _BLANK) for part in _wrap_words(line, room - len(" \\")))

    line = re.sub(r".+" if command else _COMMAND, keep_together, visible(complete_commands(text)))
    lines = [part for filled in _wrap_words(line, room) for part in filled.split(_BREAK)]
    return [f"{rest if number else first}{part}".replace(_BLANK, " ") for number, part in enumerate(lines)]


def _wrap_words(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def well_formed(text: str) -> str:
    """Return text that UTF-8 can encode: a lone surrogate becomes U+FFFD."""
    return text if text.isascii() else re.sub(_SURROGATES, "\ufffd", text)


class NotWritten(OSError):
    """stdout or stderr could not be written."""


def put(stream: IO[str], text: str) -> None:
    """Write text in one piece, in ASCII where the stream's encoding needs it.

    Raises:
        BrokenPipeError: the reader is gone.
        NotWritten: the disk is full, or the stream is closed.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotWritten(error.errno, error.strerror) from error
