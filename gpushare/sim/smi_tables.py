"""The tables of nvidia-smi: the summary, ``-L`` and ``pmon``, as driver 580 prints them."""

from __future__ import annotations

import time

from gpushare.sim import activity, smi_view
from gpushare.sim.mps_servers import binary_version
from gpushare.sim.smi_view import Chosen
from gpushare.sim.state import SimulatedHostState, SimulatedMigInstance
from gpushare.units import MIB

_WIDE = "+-----------------------------------------------------------------------------------------+\n"
_RULE = "+-----------------------------------------+------------------------+----------------------+\n"
_HEAD = """\
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
"""
_MIG_RULE = "+------------------+----------------------------------+-----------+-----------------------+\n"
_MIG_HEAD = """\
| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |
|      ID  ID  Dev |                Shared BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |
|                  |                                  |        ECC|                       |
|==================+==================================+===========+=======================|
"""
_PROCESS_HEAD = """\
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
"""
_NOBODY = "|  No running processes found                                                             |\n"
_MODES = {0: "Default", 1: "E. Thread", 2: "Prohibited", 3: "E. Process"}
_NAME_WIDTH = 36


def listing(chosen: list[Chosen]) -> str:
    """Return ``nvidia-smi -L``: GPUs and their MIG devices with UUIDs."""
    text = ""
    for one in chosen:
        if one.gpu.lost:
            text += smi_view.lost_text(one)
            continue
        text += f"GPU {one.index}: {one.model.name} (UUID: {one.gpu.uuid})\n"
        for number, instance in enumerate(one.gpu.mig if one.mig_enabled else []):
            name = activity.device_name(one.target(), instance)
            text += f"  MIG {name:<11} Device {number:>2}: (UUID: {instance.uuid})\n"
    return text


def summary(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    """Return the table of ``nvidia-smi`` without arguments."""
    binary = binary_version(state.driver)
    cuda = f"{binary // 1000}.{binary % 1000 // 10}"
    title = f"| NVIDIA-SMI {state.driver:<22} Driver Version: {state.driver:<14} CUDA Version: {cuda:<8} |\n"
    text = time.strftime("%a %b %e %H:%M:%S %Y") + "       \n" + _WIDE + title + _RULE + _HEAD
    text += "".join(_gpu_rows(state, one) + _RULE for one in chosen)
    if any(one.mig_enabled for one in chosen):
        text += "\n" + _WIDE + _MIG_HEAD + (_mig_rows(state, chosen) or _NO_MIG + _WIDE)
    return text + "\n" + _WIDE + _PROCESS_HEAD + (_process_rows(state, chosen) or _NOBODY) + _WIDE


_NO_MIG = "|  No MIG devices found                                                                   |\n"


def _gpu_rows(state: SimulatedHostState, one: Chosen) -> str:
    persistence = "On" if one.gpu.persistence else "Off"
    ecc = "On" if one.mig_enabled else "0"
    memory = smi_view.memory_mib(state, one)
    used, total = ("N/A", "N/A") if memory is None else (f"{memory[2]}MiB", f"{memory[0]}MiB")
    busy = smi_view.utilization(state, one)
    percent = "N/A" if busy is None else f"{busy}%"
    watts, cap = smi_view.power_watts(state, one), one.model.power_limit_watts
    power = f"{'N/A':>16} /{'N/A':>6} " if watts is None else f"{watts:>15}W /{cap:>5}W "
    mig = {None: "N/A", 0: "Disabled", 1: "Enabled"}[one.gpu.mig_mode]
    temperature, mode = smi_view.temperature(state, one), _MODES[one.gpu.compute_mode]
    return (
        f"|{one.index:>4}  {one.model.name[:27]:<27}{persistence:>6}  |   {one.gpu.pci_bus_id} Off |{ecc:>21} |\n"
        f"| N/A  {temperature:>3}C    P0{power}|{used:>11} /{total:>10} |{percent:>8}{mode:>13} |\n"
        f"|{'':41}|{'':24}|{mig:>21} |\n"
    )


def _mig_rows(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    text = ""
    for one in chosen:
        for number, instance in enumerate(one.gpu.mig if one.mig_enabled else []):
            text += _mig_row(state, one, number, instance) + _MIG_RULE
    return text


def _mig_row(state: SimulatedHostState, one: Chosen, number: int, instance: SimulatedMigInstance) -> str:
    profile = one.model.profile(instance.profile)
    memory = smi_view.memory_mib(state, one, instance) or (0, 0, 0)
    engines = (
        (profile.copy_engines, profile.encoders, profile.decoders, profile.optical_flow_engines, profile.jpeg_engines)
        if profile
        else (None,) * 5
    )
    copy, encode, decode, flow, jpeg = ("-" if value is None else str(value) for value in engines)
    sm = activity.device_multiprocessors(one.target(), instance)
    return (
        f"|{one.index:>3}{instance.gpu_instance_id:>5}{instance.compute_instance_id:>4}{number:>4}  |"
        f"{memory[2]:>16}MiB /{memory[0]:>6}MiB    |{sm:>3}      0 |"
        f"{copy:>3}{encode:>4}{decode:>5}{flow:>5}{jpeg:>5} |\n"
        f"|{'':18}|{0:>16}MiB /{memory[0]:>6}MiB    |{'':11}|{'':23}|\n"
    )


def _process_rows(state: SimulatedHostState, chosen: list[Chosen]) -> str:
    names = activity.process_names(state)
    text = ""
    for one in chosen:
        for resident in smi_view.residents(state, one):
            gi = "N/A" if resident.gpu_instance_id is None else f"{resident.gpu_instance_id:>2} "
            ci = "N/A" if resident.compute_instance_id is None else f"{resident.compute_instance_id:>2} "
            used = f"{resident.memory_bytes // MIB}MiB"
            text += (
                f"|{one.index:>5}   {gi}  {ci}{resident.pid:>16}{_type(resident):>7}   "
                f"{names.get(resident.pid, '[Not Found]')[:_NAME_WIDTH]:<{_NAME_WIDTH}}{used:>10} |\n"
            )
    return text


def pmon(state: SimulatedHostState, chosen: list[Chosen], *, memory: bool) -> str:
    """Return ``nvidia-smi pmon -c 1``, with frame buffer columns for ``-s um``.

    Under MPS the work of the clients is shown at their server (H200, driver 580).
    """
    extra = ("     fb   ccpm", "     MB     MB") if memory else ("", "")
    text = f"# gpu         pid   type     sm    mem    enc    dec    jpg    ofa{extra[0]}    command \n"
    text += f"# Idx           #    C/G      %      %      %      %      %      %{extra[1]}    name \n"
    names = activity.process_names(state)
    for one in chosen:
        found = smi_view.residents(state, one)
        if not found:
            blanks = f"{'-':>7}" * (8 if memory else 6)
            text += f"{one.index:>5}{'-':>11}{'-':>6}{blanks}    {'-':<15}\n"
        busy = {} if one.mig_enabled else activity.samples(state, one.target())
        for resident in found:
            percent = busy.get(resident.pid)
            cells = ["-", "-"] if percent is None else [str(round(percent)), str(activity.memory_bandwidth(percent))]
            cells += ["-"] * 4 + ([str(resident.memory_bytes // MIB), "0"] if memory else [])
            row = "".join(f"{cell:>7}" for cell in cells)
            name = names.get(resident.pid, "-")[:15]
            text += f"{one.index:>5}{resident.pid:>11}{_type(resident):>6}{row}    {name:<15}\n"
    return text


def _type(resident: activity.Resident) -> str:
    return "G" if resident.graphics else "M+C" if resident.mps_client else "C"
