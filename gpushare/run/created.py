"""The instance that `run --mig PROFILE --create` makes for its job, and removes after it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from types import TracebackType

from gpushare.base.errors import BadUsage, GpushareError, InUse, NotFound
from gpushare.base.model import MigInstance
from gpushare.base.selection import Device
from gpushare.base.units import quoted
from gpushare.host.host import Host
from gpushare.mig.driver import MigReader, need_rights
from gpushare.mig.holders import no_plan_error
from gpushare.mig.on_demand import OnDemand, make_instance, plan_instance, remove_instance, sweep_orphans
from gpushare.mig.places import means_profile, selected_gpus, single_request
from gpushare.mig.plan import MigPlan, NoPlan, Why, shown_steps
from gpushare.mig.wish import find_profile
from gpushare.plan import Plan
from gpushare.run.program import step_of_run
from gpushare.show.plan import plan_result
from gpushare.show.result import Result
from gpushare.signals import ending_signals_ignored


class Creator(contextlib.AbstractContextManager["Creator"]):
    """Makes an instance of a profile for a job when none is free, and removes what it made at the end."""

    def __init__(self, host: Host, text: str, gpu: str | None, say: Callable[[str], None]) -> None:
        """Raises BadUsage: the text is no profile; NotFound: MIG is off; NoPermission: this user may not change MIG."""
        if not means_profile(text):
            raise BadUsage(
                f"--create makes an instance of a profile, and {quoted(text)} is a name",
                "give a profile: --mig 1g --create",
                code="bad_mig",
            )
        self._host, self._text, self._say = host, text, say
        candidates = selected_gpus(host, gpu)
        self.gpus = [each for each in candidates if each.mig_enabled]
        if not self.gpus:
            first_capable = next((each.index for each in candidates if each.mig_capable), 0)
            raise NotFound(
                "MIG is off on the GPUs that the job may have: an instance is made only where it is on",
                f"switch it on first: sudo gpushare mig enable -g {first_capable}",
                code="mig_off",
            )
        self._made: list[OnDemand] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was made; if that fails, the next change of MIG tries again.

        Raises:
            GpushareError: it was not removed, and nothing else has failed.
        """
        with ending_signals_ignored():
            for record in self._made:
                try:
                    reason = remove_instance(self._host, record)
                except GpushareError as failed:
                    text = f"the job has ended, and its instance {record} was not removed: {failed.message}"
                    if error is None:
                        raise failed.restated(message=text, hint="remove it: gpushare mig recover") from failed
                    self._say(f"{text}; remove it: gpushare mig recover")
                else:
                    if reason is not None:
                        self._say(f"the instance {record} stays: {reason}")

    def remove_leftovers(self) -> None:
        """Remove the instances that killed jobs have left: they may take the room for a new one."""
        with contextlib.suppress(GpushareError):
            sweep_orphans(self._host)

    def plan(self) -> MigPlan | NoPlan:
        """Return the plan for an instance, or why none fits now. Raises NotSupported: it never fits."""
        planned = plan_instance(self._host, self._text, self.gpus)
        if isinstance(planned, NoPlan) and planned.why is Why.NEVER:
            raise no_plan_error(planned)
        return planned

    @property
    def device(self) -> Device:
        """Return an instance as it would be made on the first GPU, without a UUID: checks of the program need a device."""
        gpu = self.gpus[0]
        profile = find_profile(str(single_request(self._text).profile), MigReader(self._host.nvml).profiles(gpu.index))
        return Device(gpu=gpu, mig=MigInstance(uuid="", profile=profile.name, memory_total_bytes=profile.memory_bytes))

    def make(self) -> None:
        """Make an instance for the job, to be removed after it. Raises as `make_instance`."""
        need_rights(self._host)
        self._made.append(make_instance(self._host, self._text, self.gpus))
        # NVML lists a new instance once it is opened again.
        self._host.nvml.restart()

    def make_if_room(self) -> bool:
        """Make an instance if there is room for it now; return whether there was."""
        if isinstance(self.plan(), NoPlan):
            return False
        try:
            self.make()
        except InUse:
            # Another change came first.
            return False
        return True

    def dry_run_result(self, command: Sequence[str]) -> Result:
        """Return what would be done, as the result of a dry run. Raises as `no_plan_error`: no instance fits now."""
        plan = self.plan()
        if isinstance(plan, NoPlan):
            raise no_plan_error(plan)
        changed_gpu = next(gpu for gpu in plan.gpus if gpu.changes)
        new = changed_gpu.created[0].instance
        steps = (
            *shown_steps(plan),
            step_of_run(f"run {command[0]} in {new} of GPU {changed_gpu.gpu}", shlex.join(command)),
            step_of_run(
                f"destroy {new} on GPU {changed_gpu.gpu}, unless another program is in it",
                f"gpushare mig destroy {new} -g {changed_gpu.gpu}",
            ),
        )
        return plan_result(Plan(title="the program has ended", steps=steps), dry_run=True)
