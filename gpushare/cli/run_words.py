"""What `gpushare run` is asked beside limits: a role, a farm; and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare.errors import BadUsage


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The options of a production or an opportunistic job, as typed."""

    production: str | None
    opportunistic: bool
    beside: str | None
    pause: bool
    # Percent; None: not said.
    duty: float | None = None

    @property
    def any(self) -> bool:
        """Return whether a role was asked for."""
        return self.production is not None or self.opportunistic


@dataclass(frozen=True, kw_only=True)
class Farming:
    """The options of a farm, as typed."""

    copies: int | None
    logs: str | None
    restart: int
    stall: str | None
    bench: str | None


def check_combination(roles: Roles, farming: Farming, *, mig: str | None, strict: bool) -> None:
    """Raise unless the options go together.

    Raises:
        BadUsage: they do not.
    """
    if farming.copies is None and (farming.logs or farming.restart or farming.stall or farming.bench):
        raise _wrong(
            "--logs, --restart, --stall and --bench belong to --copies", "gpushare run --copies 4 --logs DIR -- CMD"
        )
    if not roles.opportunistic and (roles.beside is not None or roles.pause or roles.duty is not None):
        raise _wrong(
            "--for, --pause and --duty-cycle belong to --opportunistic",
            "gpushare run --opportunistic --for NAME -- CMD",
        )
    if roles.pause and roles.duty is not None:
        raise _wrong(
            "--pause is none of the time and --duty-cycle a part of it: not both",
            "gpushare run --opportunistic --duty-cycle 50 -- CMD",
        )
    if roles.production is not None and roles.opportunistic:
        raise _wrong("a job is --production or --opportunistic, not both", "gpushare run --production NAME -- CMD")
    if mig is not None and (roles.any or farming.copies is not None):
        raise _wrong(
            "--mig gives a program an instance for itself, without roles or copies", "gpushare run --mig 1g -- CMD"
        )
    if farming.copies is not None and (roles.any or strict):
        raise _wrong(
            "--copies goes without --production, --opportunistic and --strict", "gpushare run --copies 4 -- CMD"
        )
    if farming.copies is not None and not 1 <= farming.copies <= 1000:
        raise BadUsage(f"--copies {farming.copies} is outside 1 to 1000", "give --copies 8", code="bad_copies")
    if farming.restart < 0:
        raise BadUsage(f"--restart {farming.restart} is below 0", "give --restart 1", code="bad_restart")


def _wrong(what: str, example: str) -> BadUsage:
    return BadUsage(what, f"for example: {example}", code="bad_combination")
