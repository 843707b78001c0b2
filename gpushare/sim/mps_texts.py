"""The texts of nvidia-cuda-mps-control, per driver branch."""

from __future__ import annotations

NO_DAEMON = "Cannot find MPS control daemon process\n"
# Of two conversations at once the daemon drops one, with this or in silence (seen on driver 580).
CANNOT_SEND = "Cannot send command to MPS control daemon process\n"
ONLY_ROOT = "Only root user may enable -multiuser-server!\n"
NO_LOGS = "Warning: Failed writing log files to directory [{}]. No logs will be available.\n"
RUNNING = "An instance of this daemon is already running\n"

_USAGE_580 = """\
CUDA MPS Control for Linux/Unix/QNX.
Copyright (C) 2003 - 2025 NVIDIA Corporation.

  This program allows multiple CUDA processes to share a single GPU context. \
For information on how to use the CUDA MPS, see the nvidia-cuda-mps-control manual page.

nvidia-cuda-mps-control [options] [command]
OPTIONS:
  -h,--help                Print this message
  -d,--daemon              Setup the daemon in the background
  -f,--forground           Setup the daemon in the foreground
  -M,--multiuser-server    Enable multi-user mode
  -q,--ready-devices      Prepare the daemon to query devices on startup

COMMAND:
  start_server -uid <user id>
                       Start a new instance of nvidia-cuda-mps-server with the given user ID
  quit
                       Terminate the controller
  get_server_list
                       Print out a list of servers
  get_server_status <PID>
                       Print out the status of the server
  get_client_list <PID>
                       List the client applications connected to the server
  get_device_client_list [<PID>]
                       List the devices and their client applications
  ps [-p PID]
                       Report a snapshot of the current client processes
  set_default_active_thread_percentage <percentage>
                       Set default active thread percentage for upcoming servers
  get_default_active_thread_percentage
                       Query the current default available thread percentage
  set_active_thread_percentage <PID> <percentage>
                       Override the active thread percentage of the MPS server
  get_active_thread_percentage <PID>
                       Query the current active thread percentage of the MPS server
  set_default_device_pinned_mem_limit <dev> <value>
                       Set default device pinned memory for upcoming servers
  get_default_device_pinned_mem_limit <dev>
                       Query the current default pinned memory limit for the device
  set_device_pinned_mem_limit <PID> <dev> <value>
                       Override the device pinned memory limit for MPS servers
  get_device_pinned_mem_limit <PID> <dev>
                       Query the current device pinned memory limit of the MPS server for the device
  set_default_client_priority <priority>
                       Sets default client priority for incoming clients
  get_default_client_priority
                       Query the current priority value that will be used for new clients
  terminate_client <server PID> <client PID>
                       Terminate all the outstanding GPU work of the MPS client process running on the MPS server
  device_query [<PID>] [--csv]
                       Enumerate all usable devices

"""

_USAGE_OLD = """\
CUDA MPS Control for Linux/Unix.
Copyright (C) 2003 - {year} NVIDIA Corporation.

  This program allows multiple CUDA processes to share a single GPU context. \
For information on how to use the CUDA MPS, see the nvidia-cuda-mps-control manual page.

"""

_STARTS = "                       Start a new instance of nvidia-cuda-mps-server with the given user ID\n"

_SM_COMMANDS_595 = """\
  sm_partition add <device UUID> <number of chunks>
                       Create a partition on the specified device of n chunks on the MPS server
  sm_partition rm <device UUID> <partition ID>
                       Remove a partition with ID on device UUID from the MPS server
  lspart
                       Report a snapshot of the currently set device partitions
"""


def usage(major: int) -> str:
    """Return what ``-h`` prints on a driver branch (seen on 535, 550, 555, 580 and 595)."""
    if major < 580:
        return _USAGE_OLD.format(year=2023 if major < 555 else 2024)
    if major < 590:
        return _USAGE_580
    return (
        _USAGE_580.replace("  -q,--ready", "  -S,--static-partitioning Enable static partitioning mode\n  -q,--ready")
        .replace(
            "  start_server -uid <user id>\n" + _STARTS,
            "  start_server -uid <user id> [-mlopart]\n"
            + _STARTS
            + "                       If mlopart is specified, the server will attempt to create MLOPart devices\n"
            "  shutdown_server <PID>\n                       Shutdown the server\n",
        )
        .replace("  device_query [", _SM_COMMANDS_595 + "  device_query [")
        .replace(
            "Enumerate all usable devices\n",
            "Enumerate all usable devices\n"
            "                       If PID is provided, only the devices of the specified server are enumerated\n",
        )
    )


def version(binary: int) -> str:
    """Return what ``-v`` prints (drivers 580 and up)."""
    return (
        f"CUDA MPS Control for Linux/Unix/QNX. Binary version: {binary}\n"
        "Copyright (C) 2003 - 2025 NVIDIA Corporation.\n\n"
    )
