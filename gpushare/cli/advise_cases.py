"""Where the case of ``gpushare advise`` comes from: flags, a file, what runs now, a recording, questions."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from gpushare.cli.common import answered
from gpushare.errors import BadUsage, NotFound, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpushare.advice.situation import Situation
    from gpushare.advice.workload import Case, Workload
    from gpushare.host.host import Host


_MOST_CHARACTERS: Final = 256 << 10


def case_of(words: Mapping[str, Any], *, root: bool | None, pair: tuple[int | None, int | None]) -> Case:
    """Return the case of the flags. ``pair`` is how many production and opportunistic processes there are.

    Raises:
        BadUsage: a value that is none, or flags that contradict each other.
    """
    from gpushare.advice.workload import Case, Role, workload_of

    production, opportunistic = pair
    if production is None and opportunistic is None:
        return Case(workloads=(workload_of(words),), root=root)
    if words.get("processes") is not None or words.get("role") is not None:
        raise BadUsage(
            "--production and --opportunistic say how many processes there are",
            "leave --processes and --role away",
            code="two_counts",
        )
    one = workload_of(words)
    # What fills the GPU is the opportunistic job: for production that would be no case for sharing.
    roles = [(Role.PRODUCTION, production), (Role.OPPORTUNISTIC, opportunistic)]
    if opportunistic is None:
        roles = roles[:1]
    return Case(
        workloads=tuple(
            replace(
                one,
                role=role,
                processes=count or 1,
                saturating=one.saturating if role is Role.OPPORTUNISTIC or opportunistic is None else None,
                bandwidth_bound=one.bandwidth_bound if role is Role.OPPORTUNISTIC else None,
            )
            for role, count in roles
        ),
        root=root,
    )


def case_from_file(path: str, *, root: bool | None) -> Case:
    """Return the case of a file; ``-`` is stdin.

    Raises:
        NotFound, OperationFailed, BadUsage: it is not there, cannot be read, or is no case.
    """
    from gpushare.advice.workload_file import read_case

    try:
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}", "write one: see gpushare advise --help", code="no_file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OperationFailed(f"cannot read {path}: {reason}", "give a YAML file", code="not_readable") from None
    if len(text) > _MOST_CHARACTERS:
        raise OperationFailed(f"{path} is larger than 256 KiB", "give a YAML file", code="not_readable")
    case = read_case(text, path)
    return case if root is None else replace(case, root=root)


def overlaid(case: Case, words: Mapping[str, Any]) -> Case:
    """Return a case with what the flags say for all of its workloads."""
    from gpushare.advice.workload import workload_of

    said = workload_of({key: value for key, value in words.items() if value is not None})
    changes = {name: value for name, value in vars(said).items() if value is not None}
    return replace(case, workloads=tuple(replace(one, **changes) for one in case.workloads))


# -- what runs, and what ran -----------------------------------------------------------------------


def case_from_now(host: Host, index: int, *, root: bool | None) -> Case:
    """Return what runs on a GPU now, as if it were to be started again: one workload per user and program.

    Raises:
        NotFound: nobody is on the GPU, or who is cannot be seen.
    """
    from gpushare.host.snapshot import Observer

    gpu = next(one for one in Observer(host).look().gpus if one.index == index)
    if gpu.processes is None:
        raise NotFound(
            f"who is on GPU {index} cannot be seen from here",
            f"say what runs: gpushare advise -g {index} --processes 4; or ask on the host, outside the container",
            code="not_seen",
        )
    seen = [one for one in gpu.processes if (one.compute or one.mps) and "nvidia-cuda-mps" not in (one.name or "")]
    entries = [(one.user, one.name, one.memory_used_bytes, one.graphics) for one in seen]
    graphics = any(one.graphics and not one.compute for one in gpu.processes)
    if not entries:
        raise NotFound(
            f"no program is on GPU {index}", "say what shall run: gpushare advise --processes 4", code="nobody"
        )
    return _case(entries, root=root, graphics=graphics or None)


def case_from_recording(path: str, index: int, *, root: bool | None) -> Case:
    """Return what a recording of ``gpushare observe`` saw on a GPU.

    Raises:
        NotFound: there is no such file, or nobody was on the GPU.
        OperationFailed, NotSupported: it is no recording of ours.
    """
    from gpushare.advice.workload import Case, Pattern, Workload
    from gpushare.measure.recording import read_recording, workloads_of

    found = [one for one in workloads_of(read_recording(path)) if one.gpu == index]
    if not found:
        raise NotFound(
            f"{path} saw no program on GPU {index}",
            f"look into it: gpushare observe --from {shlex.quote(str(path))}",
            code="nobody",
        )
    workloads = tuple(
        Workload(
            name=one.name,
            user=one.user,
            processes=1,
            memory=_without_context(one.memory_peak_bytes),
            pattern=None if one.pattern is None else Pattern(one.pattern),
        )
        for one in found
    )
    return Case(workloads=_together(workloads), root=root)


def _case(
    entries: list[tuple[str | None, str | None, int | None, bool]], *, root: bool | None, graphics: bool | None
) -> Case:
    from gpushare.advice.workload import Case, Workload

    workloads = tuple(
        Workload(name=name, user=user, processes=1, memory=_without_context(memory), graphics=graphics)
        for user, name, memory, _ in entries
    )
    return Case(workloads=_together(workloads), root=root)


def _together(workloads: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """Return equal programs of one user as one workload of several processes, with the largest memory."""
    counts = Counter((one.user, one.name) for one in workloads)
    merged = []
    for (user, name), count in counts.items():
        same = [one for one in workloads if (one.user, one.name) == (user, name)]
        sizes = [one.memory for one in same if one.memory is not None]
        patterns = {one.pattern for one in same}
        merged.append(
            replace(
                same[0],
                processes=count,
                memory=max(sizes) if len(sizes) == len(same) else None,
                pattern=patterns.pop() if len(patterns) == 1 else None,
            )
        )
    return tuple(merged)


def _without_context(used: int | None) -> int | None:
    """Return what a process holds without its CUDA context, which the budget adds again."""
    from gpushare.advice.memory import MPS_CONTEXT_BYTES
    from gpushare.units import MIB

    return None if used is None else max(used - MPS_CONTEXT_BYTES, MIB)


# -- questions -------------------------------------------------------------------------------------


def _prompt(text: str, words: list[str]) -> str:
    """Return a question with its answers, on a line of their own where one line is too short."""
    answers = f"[{'/'.join(words)}, Enter: not known] "
    width = max(shutil.get_terminal_size().columns, 40)
    if len(text) + len(answers) + max(map(len, words)) < width:
        return f"{text} {answers}"
    return "\n".join([*textwrap.wrap(text, width - 1), f"  {answers}"])


def asked(situation: Situation) -> Situation:
    """Ask what still decides, one question after the other; an empty answer leaves it open."""
    from gpushare.advice.advise import with_answer
    from gpushare.advice.ask import next_question

    skipped: set[str] = set()
    while (question := next_question(situation, frozenset(skipped))) is not None:
        words = [word for word, _ in question.answers]
        line = answered(_prompt(question.text, words))
        if not line:
            break
        text = line.strip().lower()
        fitting = [value for word, value in question.answers if text and word.startswith(text)]
        if len(fitting) == 1:
            situation = with_answer(situation, question.field, fitting[0])
        elif text:
            sys.stderr.write(f"  not one of: {', '.join(words)}\n")
            continue
        else:
            skipped.add(question.field)
    return situation
