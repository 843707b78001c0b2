"""Limits as users type them: one for all devices, or one per GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpushare.errors import BadUsage, NotFound
from gpushare.units import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpushare.model import Priority
    from gpushare.mps.limits import MpsLimits
    from gpushare.selection import Device


# "none" as typed: the limit is to be removed, where None leaves it as it is.
_NONE: Final = object()


def percentage(option: str, text: str, *, example: str, hint: str, code: str) -> float:
    """Return a part of something in percent, as typed: ``97%`` or ``97``.

    Raises:
        BadUsage: it is not from 0.1 to 100, or may as well be a share: ``0.97``.
    """
    from gpushare.units import parse_thread_percentage

    try:
        percent = parse_thread_percentage(text)
    except BadUsage:
        raise BadUsage(f"{option} '{text[:40]}' is not a percentage from 0.1 to 100", hint, code=code) from None
    if percent <= 1 and "%" not in text:
        raise BadUsage(f"{option} {text} may be a share or a percentage", f"say which: {example}", code=code)
    return percent


def positive(option: str, text: str, example: str) -> float:
    """Return a time in seconds, as typed.

    Raises:
        BadUsage: it is none, or zero.
    """
    from gpushare.units import parse_seconds

    seconds = parse_seconds(text)
    if seconds <= 0:
        raise BadUsage(f"{option} {text} is no time", f"give {option} {example}", code="bad_duration")
    return seconds


class Limits:
    """Limits as typed: one value for all devices, or one per GPU (``0=4G,1=8G``).

    With ``removable`` a memory limit may be ``none``, which takes it away.
    """

    def __init__(
        self, threads: str | None, memory: str | None, priority: str | None, *, removable: bool = False
    ) -> None:
        from gpushare.units import parse_memory_limit, parse_thread_percentage

        # Parsed before the host is asked: a wrong word costs nothing.
        self._threads = _by_gpu("--threads", threads, parse_thread_percentage)
        self._memory = _by_gpu("--memory", memory, _memory_or_none if removable else parse_memory_limit)
        self._priority = priority_of(priority)

    def for_devices(self, devices: Sequence[Device]) -> dict[str, MpsLimits]:
        """Return the limits by device UUID.

        Raises:
            BadUsage: a limit names a GPU that is not among them.
        """
        from gpushare.mps.limits import MpsLimits

        threads, memory = _resolve(self._threads, devices), _resolve(self._memory, devices)
        return {
            device.uuid: MpsLimits(
                threads_percent=threads.get(device.uuid),
                memory_limit_bytes=_limit(memory.get(device.uuid)),
                no_memory_limit=memory.get(device.uuid) is _NONE,
                priority=self._priority,
            )
            for device in devices
        }


def _memory_or_none(text: str) -> object:
    from gpushare.units import parse_memory_limit

    return _NONE if text.strip().lower() == "none" else parse_memory_limit(text)


def _limit(value: Any) -> int | None:
    return None if value is None or value is _NONE else int(value)


def priority_of(text: str | None) -> Priority | None:
    """Return the priority that a user names.

    Raises:
        BadUsage: neither normal nor low.
    """
    from gpushare.model import Priority

    if text is None:
        return None
    names = {level.title: level for level in Priority} | {str(int(level)): level for level in Priority}
    if text.lower() not in names:
        raise BadUsage(
            f"{quoted(text)} is not a priority", "give --priority normal or --priority low", code="bad_priority"
        )
    return names[text.lower()]


def _by_gpu(option: str, text: str | None, parse: Callable[[str], object]) -> dict[str | None, Any]:
    if text is None:
        return {}
    if "=" not in text:
        return {None: parse(text)}
    values: dict[str | None, Any] = {}
    for entry in text.split(","):
        gpu, equals, value = entry.partition("=")
        if not equals or not gpu.strip():
            raise BadUsage(
                f"{quoted(entry)} in {option} names no GPU",
                f"give one for all, or {option} 0=...,1=...",
                code="bad_limit",
            )
        if gpu.strip() in values:
            raise BadUsage(f"{option} names GPU {gpu.strip()} twice", f"give {option} 0=...,1=...", code="bad_limit")
        values[gpu.strip()] = parse(value)
    return values


def _resolve(values: dict[str | None, Any], devices: Sequence[Device]) -> dict[str, Any]:
    from gpushare.selection import select

    if None in values:
        return {device.uuid: values[None] for device in devices}
    uuids = {device.uuid for device in devices}
    # Two MIG instances have one GPU.
    gpus = list({device.gpu.index: device.gpu for device in devices}.values())
    resolved: dict[str, Any] = {}
    for name, value in values.items():
        try:
            named = select(name, gpus)
        except NotFound:
            named = ()
        if not named or any(device.uuid not in uuids for device in named):
            raise BadUsage(
                f"a limit names GPU {quoted(name or '')}, which is not among the chosen: {', '.join(d.title for d in devices)}",
                f"choose it too: -g {','.join([*(d.selector for d in devices), str(name)])}",
                code="bad_limit",
            )
        for device in named:
            resolved[device.uuid] = value
    return resolved
