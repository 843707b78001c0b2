"""nvidia-smi mig of a simulated host: GPU instances and compute instances, listed, created and destroyed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from gpushare.sim import mig_changes, mig_compute, mig_layout, smi_mig_tables
from gpushare.sim.mps_servers import driver_major
from gpushare.sim.nvml_abi import ERROR_TEXTS, Code, Refused
from gpushare.sim.smi import MAYBE, NO_VALUE, VALUE, parse
from gpushare.sim.smi_gpus import changed, choose_present, require_root
from gpushare.sim.smi_mig_tables import Place
from gpushare.sim.smi_view import Chosen, lost_text
from gpushare.sim.state import SimulatedHostState, SimulatedMigInstance

# Of several commands the first one here is carried out.
_COMMANDS: Final = (
    "-lgip",
    "-lgipp",
    "-cgi",
    "-dgi",
    "-lgi",
    "-lcip",
    "-lcipp",
    "-cci",
    "-dci",
    "-lci",
    "-C",
    "-gi",
    "-ci",
)
_OPTIONS: Final = {
    "-h": ("--help", NO_VALUE),
    "-i": ("--id", VALUE),
    "-gi": ("--gpu-instance-id", VALUE),
    "-ci": ("--compute-instance-id", VALUE),
    "-lgip": ("--list-gpu-instance-profiles", NO_VALUE),
    "-lgipp": ("--list-gpu-instance-possible-placements", NO_VALUE),
    "-C": ("--default-compute-instance", NO_VALUE),
    "-cgi": ("--create-gpu-instance", VALUE),
    "-dgi": ("--destroy-gpu-instance", NO_VALUE),
    "-lgi": ("--list-gpu-instances", NO_VALUE),
    "-lcip": ("--list-compute-instance-profiles", NO_VALUE),
    "-lcipp": ("--list-compute-instance-possible-placements", NO_VALUE),
    "-cci": ("--create-compute-instance", MAYBE),
    "-dci": ("--destroy-compute-instance", NO_VALUE),
    "-lci": ("--list-compute-instances", NO_VALUE),
}


class _Failed(Exception):
    """A command failed: its lines, and the code that NVML gave."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def run(state: SimulatedHostState, words: list[str]) -> tuple[int, str]:
    """Carry out the words after ``mig`` on the state; return exit code and output.

    Raises:
        Wrong: the arguments are.
    """
    options = dict(parse(words, _OPTIONS))
    command = next((name for name in _COMMANDS if name in options), None)
    if "-h" in options or command is None:
        return 0, smi_mig_tables.HELP
    chosen = choose_present(state, options.get("-i"))
    lost = next((one for one in chosen if one.gpu.lost), None)
    if lost is not None:
        return 15, lost_text(lost)
    newer = driver_major(state.driver) >= 550
    able = [one for one in chosen if one.gpu.mig_mode is not None]
    enabled = [one for one in able if one.mig_enabled]
    if newer and not able:
        return 6, "No MIG-supported devices found.\n"
    # 535 lists nothing of a GPU with MIG off, not even its profiles.
    if command in {"-lgip", "-lgipp"} and (able if newer else enabled):
        listed = able if newer else enabled
        wide = _wide(state)
        return 0, smi_mig_tables.profiles(listed, wide=wide) if command == "-lgip" else smi_mig_tables.placements(
            listed
        )
    if not enabled:
        return (0 if newer else 6), "No MIG-enabled devices found.\n"
    try:
        return _carry_out(state, enabled, command, options)
    except _Failed as failed:
        return int(failed.code), failed.text


def _wide(state: SimulatedHostState) -> bool:
    # The columns of names grew with 570.
    return driver_major(state.driver) >= 570


def _carry_out(
    state: SimulatedHostState, enabled: list[Chosen], command: str, options: dict[str, str | None]
) -> tuple[int, str]:
    if command == "-cgi":
        return 0, _create_gpu_instances(state, enabled, options["-cgi"] or "", whole="-C" in options)
    places = _places(enabled, None if command == "-lgi" else _ids(options.get("-gi")))
    if not places:
        return 6, "No GPU instances found: Not Found\n"
    if command in {"-lci", "-dci", "-C", "-gi", "-ci"}:
        return _compute_instances(state, places, _ids(options.get("-ci")), command)
    if command == "-dgi":
        return 0, _each(state, places, _destroy_gpu_instance, "destroy GPU instances")
    if command == "-cci":
        text = options["-cci"]
        wanted = [None] if text is None else [part for part in text.split(",") if part]
        return 0, _each(
            state,
            places,
            lambda state, place: "".join(_create_compute_instance(state, place, one) for one in wanted),
            "create compute instances",
        )
    if command == "-lgi":
        return 0, smi_mig_tables.gpu_instances(places, wide=_wide(state))
    table = smi_mig_tables.compute_profiles if command == "-lcip" else smi_mig_tables.compute_placements
    return 0, table(places)


def _compute_instances(
    state: SimulatedHostState, places: list[Place], ids: set[int] | None, command: str
) -> tuple[int, str]:
    found = [
        (place, one)
        for place in places
        for one in place.compute_instances()
        if ids is None or one.compute_instance_id in ids
    ]
    if not found:
        return 6, "No compute instances found: Not Found\n"
    if command == "-dci":
        return 0, _destroy_compute_instances(state, found)
    # Without a command the instances are looked for, and that is all.
    return 0, smi_mig_tables.compute_instances(found) if command == "-lci" else ""


def _ids(text: str | None) -> set[int] | None:
    return None if text is None else {int(part) for part in text.split(",") if re.fullmatch("[0-9]{1,9}", part)}


def _places(chosen: list[Chosen], ids: set[int] | None) -> list[Place]:
    """Return the GPU instances in the order of nvidia-smi: by NVML's number of their profile, then by id."""
    found = []
    for one in chosen:
        here = [
            Place(one, profile, instance)
            for instance in mig_layout.gpu_instances(one.gpu)
            if (profile := one.model.profile(instance.profile)) is not None
            and (ids is None or instance.gpu_instance_id in ids)
        ]
        found += sorted(here, key=lambda place: (place.profile.nvml_profile or 0, place.instance.gpu_instance_id))
    return found


def _each(
    state: SimulatedHostState, places: list[Place], act: Callable[[SimulatedHostState, Place], str], what: str
) -> str:
    """Do one thing to each GPU instance; what was done before a failure stays."""
    text = ""
    for place in places:
        try:
            text += act(state, place)
        except _Failed as failed:
            said = f"{text}{failed.text}Failed to {what}: {ERROR_TEXTS[failed.code]}\n"
            raise _Failed(failed.code, said) from None
    return text


def _create_gpu_instances(state: SimulatedHostState, enabled: list[Chosen], wishes: str, *, whole: bool) -> str:
    text = ""
    for one in enabled:
        for wish in [part for part in wishes.split(",") if part]:
            try:
                place, said = _create_gpu_instance(state, one, wish)
                text += said
                if whole:
                    text += _create_compute_instance(state, place, None)
            except _Failed as failed:
                said = f"{text}{failed.text}Failed to create GPU instances: {ERROR_TEXTS[failed.code]}\n"
                raise _Failed(failed.code, said) from None
    return text


def _create_gpu_instance(state: SimulatedHostState, one: Chosen, wish: str) -> tuple[Place, str]:
    name, colon, start = wish.strip().partition(":")
    if not name:
        # The spelling is the program's own.
        said = f"Unable to create a GPU instace on GPU {one.index:>2} using profile {wish}: invalid placement syntax\n"
        raise _Failed(Code.INVALID_ARGUMENT, said)
    try:
        profile = next(
            (each for each in one.model.profiles if name in {str(each.id), each.name, f"MIG {each.name}"}), None
        )
        if profile is None or profile.id is None:
            raise Refused(Code.INVALID_ARGUMENT)
        require_root(state)
        digits = re.match("[0-9]{1,9}", start) if colon else None
        placement = None if digits is None else (int(digits.group()), profile.size or 0)
        with changed(state, one) as residents:
            identity = mig_changes.create_gpu_instance(one.gpu, one.model, profile.id, placement, residents)
    except Refused as refused:
        error = ERROR_TEXTS[refused.code]
        said = f"Unable to create a GPU instance on GPU {one.index:>2} using profile {wish}: {error}\n"
        raise _Failed(refused.code, said) from None
    made = next(each for each in mig_layout.gpu_instances(one.gpu) if each.gpu_instance_id == identity)
    return Place(one, profile, made), (
        f"Successfully created GPU instance ID {identity:>2} on GPU {one.index:>2} "
        f"using profile MIG {profile.name} (ID {profile.id:>2})\n"
    )


def _create_compute_instance(state: SimulatedHostState, place: Place, wish: str | None) -> str:
    one, owner = place.one, place.profile
    try:
        number = mig_compute.whole(owner)
        placement = None
        if wish is not None:
            name, _, start = wish.partition(":")
            names = {smi_mig_tables.compute_name(owner, each): each for each in mig_compute.offered(owner)}
            names |= {str(each): each for each in mig_compute.offered(owner)}
            if name.removeprefix("MIG ") not in names:
                raise Refused(Code.INVALID_ARGUMENT)
            number = names[name.removeprefix("MIG ")]
            digits = re.match("[0-9]{1,9}", start)
            placement = None if digits is None else (int(digits.group()), mig_compute.slices_of(number))
        require_root(state)
        with changed(state, one):
            identity = mig_changes.create_compute_instance(
                one.gpu, one.model, place.instance.gpu_instance_id, number, placement
            )
    except Refused as refused:
        wanted = "default" if wish is None else wish
        said = f"Unable to create a compute instance on {place.title} using profile {wanted}: {ERROR_TEXTS[refused.code]}\n"
        raise _Failed(refused.code, said) from None
    return (
        f"Successfully created compute instance ID {identity:>2} on {place.title} "
        f"using profile MIG {smi_mig_tables.compute_name(owner, number)} (ID {number:>2})\n"
    )


def _destroy_gpu_instance(state: SimulatedHostState, place: Place) -> str:
    where = f"GPU instance ID {place.instance.gpu_instance_id:>2} from GPU {place.one.index:>2}"
    try:
        require_root(state)
        with changed(state, place.one) as residents:
            mig_changes.destroy_gpu_instance(place.one.gpu, place.instance.gpu_instance_id, residents)
    except Refused as refused:
        raise _Failed(refused.code, f"Unable to destroy {where}: {ERROR_TEXTS[refused.code]}\n") from None
    return f"Successfully destroyed {where}\n"


def _destroy_compute_instances(state: SimulatedHostState, found: list[tuple[Place, SimulatedMigInstance]]) -> str:
    text = ""
    for place, instance in found:
        where = f"compute instance ID {instance.compute_instance_id:>2} from {place.title}"
        try:
            require_root(state)
            with changed(state, place.one) as residents:
                identity = place.instance.gpu_instance_id
                mig_changes.destroy_compute_instance(place.one.gpu, identity, instance.compute_instance_id, residents)
        except Refused as refused:
            error = ERROR_TEXTS[refused.code]
            said = f"{text}Unable to destroy {where}: {error}\nFailed to destroy compute instances: {error}\n"
            raise _Failed(refused.code, said) from None
        text += f"Successfully destroyed {where}\n"
    return text
