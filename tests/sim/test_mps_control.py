"""The simulated nvidia-cuda-mps-control against what the real programs of drivers 535, 550 and 580 print."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.base.errors import OperationFailed, TimedOut
from gpushare.sim import admin, mps_control, mps_servers
from tests.sim import mps
from tests.sim.mps import Mps
from tests.tables import each

DATA = Path(__file__).parent.parent / "data" / "h200-r580"
WhenItWaits = Callable[[Callable[[], object]], list[float]]
CAPTURE = (DATA / "mps-control.txt").read_text()


@pytest.fixture
def h200(sim_dir: Path) -> Mps:
    return mps.new(sim_dir)


def captured_dialogue() -> list[tuple[str, str]]:
    """Return the commands and replies of the H200 between the start of the daemon and its first client."""
    part = CAPTURE[CAPTURE.index("start exit 0") : CAPTURE.index("An instance of this daemon")]
    return [
        (command, reply) for command, reply in re.findall(r"^mps> (.*)\n((?:.*\n)*?)\[exit 0\]\n", part, re.MULTILINE)
    ]


def test_the_whole_dialogue_of_the_h200_is_repeated(h200: Mps) -> None:
    h200.start()
    dialogue = captured_dialogue()
    assert len(dialogue) >= 20
    for command, reply in dialogue:
        if "client_list" in command:
            # gpushare never asks it.
            continue
        done = h200.run(stdin=f"{command}\n")
        assert (command, done.stdout, done.stderr, done.exit_code) == (command, reply, "", 0)


def test_without_a_daemon(h200: Mps) -> None:
    for stdin in ("get_server_list\n", "", "quit\n"):
        done = h200.run(stdin=stdin)
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", "Cannot find MPS control daemon process\n")


@pytest.mark.parametrize("driver", ["535.261.03", "550.163.01"])
def test_older_programs_take_any_argument_for_the_ui(sim_dir: Path, driver: str) -> None:
    older = mps.new(sim_dir, driver=driver)
    for words in (("-v",), ("get_server_list",), ("bogus",)):
        assert older.run(*words).stderr == "Cannot find MPS control daemon process\n"
    older.start()
    # argv commands are ignored with exit 0; only stdin counts.
    assert older.run("get_default_active_thread_percentage").stdout == ""
    assert older.run("foo", stdin="get_default_active_thread_percentage\n").stdout == "100.0\n"
    assert older.run("-v").stdout == ""
    again = older.run("-d")
    assert (again.exit_code, again.stdout, again.stderr) == (1, "An instance of this daemon is already running\n", "")
    with_pid_file = (older.pipe / "nvidia-cuda-mps-control.pid").exists()
    assert with_pid_file == driver.startswith("550")
    known = older.ask("get_server_status") == "A server PID is required\n"
    assert known == driver.startswith("550")


def test_arguments_are_commands_from_580_on(h200: Mps) -> None:
    h200.start()
    assert h200.run("get_default_active_thread_percentage").stdout == "100.0\n"
    assert h200.run("set_default_active_thread_percentage", "25").stdout == "25.0\n"


def test_start_leaves_the_real_files_with_their_modes(h200: Mps) -> None:
    pid = h200.start()
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in h200.pipe.iterdir()}
    assert modes == {
        "control": "srw-rw-rw-",
        "control_lock": "-rw-rw-rw-",
        "control_privileged": "srwxr-xr-x",
        "log": "prwxrwxrwx",
        "nvidia-cuda-mps-control.pid": "-rw-rw-rw-",
    }
    assert (h200.pipe / "nvidia-cuda-mps-control.pid").read_text() == str(pid)
    assert stat.S_IMODE(h200.pipe.stat().st_mode) == 0o777
    assert (h200.log / "server.log").read_text() == ""
    line = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} Control +\d+\] "
    first, second, third = h200.control_log().splitlines()
    assert re.fullmatch(line + f"Starting control daemon using socket {h200.pipe}/control", first)
    assert re.fullmatch(line + f"To connect CUDA .* set env CUDA_MPS_PIPE_DIRECTORY={h200.pipe}", second)
    assert re.fullmatch(line + "CUDA MPS Control binary version: 13000", third)
    again = h200.run("-d")
    assert (again.exit_code, again.stdout) == (1, "An instance of this daemon is already running\n")


@pytest.mark.parametrize(("length", "code"), [(86, 0), (87, 0), (88, 1), (90, 1)])
def test_the_pipe_directory_may_have_87_bytes(h200: Mps, sim_dir: Path, length: int, code: int) -> None:
    pipe = sim_dir / "x"
    h200.pipe = pipe.with_name("x" * (length - len(str(sim_dir)) - 1))
    assert len(str(h200.pipe)) == length
    done = h200.run("-d")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", "")
    if code:
        assert sorted(path.name for path in h200.pipe.iterdir()) == ["control_lock", "log"]
        assert h200.state.daemons == []


def test_a_missing_parent_and_a_missing_log_directory(h200: Mps, sim_dir: Path) -> None:
    deep = str(sim_dir / "a" / "b")
    done = h200.run("-d", CUDA_MPS_PIPE_DIRECTORY=deep)
    assert (done.exit_code, done.stdout) == (1, f"Cannot access CUDA_MPS_PIPE_DIRECTORY={deep}\n")
    done = h200.run("-d", CUDA_MPS_LOG_DIRECTORY=deep)
    assert done.exit_code == 0
    assert done.stdout == f"Warning: Failed writing log files to directory [{deep}]. No logs will be available.\n"


def test_no_file_of_a_simulated_daemon_goes_to_the_default_directories(h200: Mps) -> None:
    before = os.path.exists("/tmp/nvidia-mps"), os.path.exists("/var/log/nvidia-mps")
    done = h200.run("-d", CUDA_MPS_PIPE_DIRECTORY="", CUDA_MPS_LOG_DIRECTORY="")
    assert done.exit_code == 0
    assert h200.state.daemons[0].pipe_directory == "/tmp/nvidia-mps"
    assert h200.run(stdin="get_server_list\n", CUDA_MPS_PIPE_DIRECTORY="").exit_code == 0
    assert (os.path.exists("/tmp/nvidia-mps"), os.path.exists("/var/log/nvidia-mps")) == before


def test_a_host_without_devices_cannot_start_a_daemon_from_580_on(h200: Mps) -> None:
    for fault, code in (("no-driver", 100), ("no-nvml", 244), ("lost", 100)):
        admin.set_fault("sim:h200", fault)
        done = h200.run("-d")
        assert (fault, done.exit_code, done.stdout, done.stderr) == (fault, code, "", "")
        admin.clear_faults("sim:h200")
    admin.set_fault("sim:h200", "driver", value="550.163.01")
    admin.set_fault("sim:h200", "lost")
    h200.start()
    assert h200.ask("get_server_list") == ""


# A user whom no machine has.
STRANGER = "2000000001"
TABLE = {
    # As the real daemons of drivers 535 and 550 read these values back.
    "10G": "10G",
    "512MB": "512M",
    "3g": "3G",
    "2000M": "1G",
    "2000": "1G",
    "1024K": "1G",
    "1.5G": "1M",
    "0G": "",
    "abc": "",
    "": "",
    "1023M": "1023M",
    "1m": "1M",
    "1GiB": "1G",
    "G": "",
    "0.5G": "",
}


def test_memory_values_are_parsed_as_the_real_daemon_parses_them(h200: Mps) -> None:
    h200.start()
    for value, expected in TABLE.items():
        said = h200.ask(f"set_default_device_pinned_mem_limit 0 {value}", "get_default_device_pinned_mem_limit 0")
        assert (value, said.strip()) == (value, expected)


@given(st.text(max_size=12))
def test_no_text_breaks_the_memory_parser(text: str) -> None:
    value = mps_servers.parse_memory(text)
    assert value is None or 0 < value < 2**44


def test_ordinals_and_uuids_are_separate_entries_and_the_last_set_wins(h200: Mps) -> None:
    h200.start()
    uuid = h200.state.gpus[0].uuid
    h200.ask("set_default_device_pinned_mem_limit 0 4G", f"set_default_device_pinned_mem_limit {uuid} 2G")
    assert (
        h200.ask("get_default_device_pinned_mem_limit 0", f"get_default_device_pinned_mem_limit {uuid}") == "4G\n2G\n"
    )
    assert h200.client().memory_limit_bytes == 2 << 30
    assert "Device pinned memory limit for device 0 set to 0x80000000 bytes" in h200.server_log()
    unknown = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
    assert (
        h200.ask(f"set_default_device_pinned_mem_limit {unknown} 3G", f"get_default_device_pinned_mem_limit {unknown}")
        == ""
    )
    assert h200.ask("set_default_device_pinned_mem_limit 99 3G", "get_default_device_pinned_mem_limit 99") == ""
    # The newer daemon has no word for it.
    assert "Invalid device ordinal!" not in h200.control_log()
    assert h200.ask("get_default_device_pinned_mem_limit") == "4G\n"


def test_older_daemons_take_a_uuid_for_device_0(sim_dir: Path) -> None:
    older = mps.new(sim_dir, driver="550.163.01")
    older.start()
    uuid = older.state.gpus[0].uuid
    older.ask("set_default_device_pinned_mem_limit 0 4G")
    assert older.ask(f"get_default_device_pinned_mem_limit {uuid}", "get_default_device_pinned_mem_limit") == "4G\n4G\n"
    # The value begins where the number ends, so what is no number clears the limit.
    assert older.ask(f"set_default_device_pinned_mem_limit {uuid} 2G", "get_default_device_pinned_mem_limit 0") == ""
    assert older.ask("set_default_device_pinned_mem_limit 99 3G", "get_default_device_pinned_mem_limit 99") == ""
    assert "Invalid device ordinal!" in older.control_log()


def test_percentages_out_of_range_print_the_old_value_and_tell_only_the_log(h200: Mps) -> None:
    h200.start()
    old = each((["33.3", "150", "0", "-5"], "33.3"))
    for text, shown in (*old, ("25%", "25.0"), ("12abc", "12.0"), ("1e1", "10.0")):
        done = h200.run(stdin=f"set_default_active_thread_percentage {text}\n")
        assert (text, done.stdout, done.exit_code) == (text, f"{shown}\n", 0)
    for text in ("nan", "inf", "", "100.04"):
        assert h200.ask(f"set_default_active_thread_percentage {text}") == "10.0\n"
    assert "Invalid percentage, expected between (0.0, 100.0]" in h200.control_log()


def test_client_priorities(h200: Mps) -> None:
    h200.start()
    assert h200.ask("set_default_client_priority 1", "get_default_client_priority") == "1\n"
    assert h200.ask("set_default_client_priority 2") == "Invalid priority value - must be 0 or 1!\n"
    assert h200.ask("get_default_client_priority", "set_default_client_priority abc") == "1\n"
    assert h200.ask("get_default_client_priority") == "0\n"


UNKNOWN_SERVER = {
    "set_active_thread_percentage 123 50": "Server 123 not found\n",
    "get_active_thread_percentage": "Server 0 not found\n",
    "set_device_pinned_mem_limit 123 0 2G": "Server 123 not found\n",
    "get_server_status 123": "Server 123 not found\n",
    "get_server_status": "A server PID is required\n",
    "": 'Unknown command ""\n',
    "set_default_active_thread_percentage .5": "0.5\n",
    "set_default_device_pinned_mem_limit 31 1G": "",
    "get_default_device_pinned_mem_limit 31": "1G\n",
    "set_default_device_pinned_mem_limit 32 1G": "",
    "get_default_device_pinned_mem_limit 32": "",
    # The tail of the number is the value, which clears the limit.
    "set_default_device_pinned_mem_limit 31x 7G": "",
    "get_default_device_pinned_mem_limit 31x": "",
    "set_default_device_pinned_mem_limit x 7G": "",
    "get_default_device_pinned_mem_limit x": "",
    "Quit": 'Unknown command "Quit"\n',
    "  get_server_list  ": "",
}


def test_commands_for_servers_that_are_not_there(h200: Mps) -> None:
    h200.start()
    for command, reply in UNKNOWN_SERVER.items():
        assert (command, h200.ask(command)) == (command, reply)


def test_several_commands_in_one_stdin_and_what_the_log_says(h200: Mps) -> None:
    h200.start()
    done = h200.run(stdin="get_default_active_thread_percentage\n\nget_default_client_priority")
    assert done.stdout == '100.0\nUnknown command ""\n0\n'
    texts = [line.partition("] ")[2] for line in h200.control_log().splitlines()[3:]]
    assert texts == [
        "Accepting connection...",
        "NEW UI",
        "Cmd:get_default_active_thread_percentage",
        "100.0",
        "Cmd:",
        'Unknown command ""',
        "Cmd:get_default_client_priority",
        "0",
        "UI closed",
    ]
    assert h200.run(stdin="quit\nget_server_list\n").stdout == ""


def test_a_server_and_its_client_in_every_list(h200: Mps) -> None:
    h200.start()
    client = h200.client(name="python3", memory_bytes=248 << 20)
    server = int(h200.ask("get_server_list"))
    assert client.mps_server == server
    assert h200.ask(f"get_server_status {server}") == "ACTIVE\n"
    uuid = h200.state.gpus[0].uuid
    header = next(line for line in CAPTURE.splitlines() if line.startswith("PID       ID"))
    row = f"{client.pid:<10}{'1':<10}{server:<15}{uuid[:22]:<26}{'4026531836':<15}{'python3':<15}"
    assert h200.ask("ps") == f"{header}\n{row}\n"
    for text in (
        f"Starting new server {server} for user {os.geteuid()}",
        f"NEW SERVER {server}: Ready",
        f"NEW CLIENT {client.pid} from user {os.geteuid()}:",
    ):
        assert text in h200.control_log()
    for text in ("Active Threads Percentage set to 100.0", f"Client {{PID: {client.pid}, Context ID: 1}} connected"):
        assert text in h200.server_log()
    h200.client()
    assert "Server already exists" in h200.control_log()


def test_server_limits_hold_for_upcoming_clients_only(h200: Mps) -> None:
    h200.start()
    first = h200.client()
    server = int(h200.ask("get_server_list"))
    assert (
        h200.ask(f"set_active_thread_percentage {server} 30", f"get_active_thread_percentage {server}")
        == "30.0\n30.0\n"
    )
    assert (
        h200.ask(f"set_device_pinned_mem_limit {server} 0 1500M", f"get_device_pinned_mem_limit {server} 0") == "1G\n"
    )
    # A default that changes later does not reach the running server.
    h200.ask("set_default_active_thread_percentage 10")
    second = h200.client(sm_percent=100, memory_bytes=4 << 30)
    assert (first.threads, first.memory_limit_bytes) == (100.0, None)
    assert (second.threads, second.memory_limit_bytes, second.memory_bytes) == (30.0, 1500 << 20, 1500 << 20)
    assert second.sm_percent == 30
    lower = h200.client(
        environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}
    )
    higher = h200.client(environment={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"})
    assert (lower.threads, lower.memory_limit_bytes, higher.threads) == (20.0, 1 << 30, 30.0)


def test_the_daemons_environment_sets_its_defaults(h200: Mps) -> None:
    h200.start(
        CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="40", CUDA_MPS_CLIENT_PRIORITY="1", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=2G"
    )
    assert h200.ask("get_default_active_thread_percentage", "get_default_client_priority") == "40.0\n1\n"
    # Not shown, but in force.
    assert h200.ask("get_default_device_pinned_mem_limit 0") == ""
    assert h200.client().memory_limit_bytes == 2 << 30
    h200.pipe = h200.pipe.with_name("p2")
    h200.start(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="400")
    assert h200.ask("get_default_active_thread_percentage") == "100.0\n"


def test_cuda_visible_devices_restricts_and_renumbers(sim_dir: Path) -> None:
    three = mps.new(sim_dir, "sim:3xa100-80gb")
    _, _, third = (gpu.uuid for gpu in three.state.gpus)
    three.start(CUDA_VISIBLE_DEVICES="2,0")
    client = three.client(environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert client.gpu_uuid == third
    with pytest.raises(OperationFailed, match="NO_DEVICE"):
        three.client(environment={"CUDA_VISIBLE_DEVICES": "2"})


def test_without_a_daemon_a_program_silently_runs_outside(h200: Mps) -> None:
    client = h200.client()
    assert (client.mps_daemon, client.mps_server, client.gpu_uuid) == (None, None, h200.state.gpus[0].uuid)
    h200.start()
    outside = h200.client(environment={"GPUSHARE_SIM_OUTSIDE": "1"})
    assert (outside.mps_daemon, outside.threads) == (None, None)


def test_another_user_waits_for_the_last_client(h200: Mps) -> None:
    h200.start()
    first = h200.client()
    second = h200.client(user=STRANGER)
    assert (second.mps_server, second.gpu_uuid) == (None, "")
    assert (
        f"NEW CLIENT {second.pid} from user {STRANGER}: Server is not ready, push client to pending list"
        in h200.control_log()
    )
    admin.end_process("sim:h200", first.pid)
    second = h200.process(second.pid)
    assert second.mps_server is not None
    assert second.gpu_uuid
    assert [server.uid for server in h200.state.daemons[0].servers] == [int(STRANGER)]


def test_more_than_48_clients_are_refused(h200: Mps) -> None:
    h200.start()
    for _ in range(48):
        h200.client()
    with pytest.raises(OperationFailed, match="MAX_CLIENTS"):
        h200.client()


@pytest.fixture
def when_it_waits(monkeypatch: pytest.MonkeyPatch) -> WhenItWaits:
    """Return a function that lets something happen the first time that the program waits; it returns all waits."""

    def prepare(act: Callable[[], object]) -> list[float]:
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 1:
                act()

        monkeypatch.setattr(mps_control, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        return waits

    return prepare


def test_quit_waits_for_clients_and_forces_with_t(h200: Mps, when_it_waits: WhenItWaits) -> None:
    h200.start()
    client = h200.client()
    with pytest.raises(TimedOut):
        h200.ask("quit", timeout=0.05)
    waited = when_it_waits(lambda: admin.end_process("sim:h200", client.pid))
    assert h200.run(stdin="quit\n", timeout=120.0).exit_code == 0
    assert waited
    assert h200.state.daemons == []
    assert sorted(path.name for path in h200.pipe.iterdir()) == ["control", "control_lock", "control_privileged"]
    h200.start()
    left = h200.client()
    assert h200.run(stdin="quit -t 0\n").exit_code == 0
    left = h200.process(left.pid)
    assert (left.broken, left.gpu_uuid, left.mps_server) == (True, "", None)


def test_privileges(h200: Mps) -> None:
    h200.start()
    admin.set_fault("sim:h200", "user", value="65534")
    refused = (
        "Insufficient privileges for UID 65534. Control deamon settings can only be modified by the user started it "
        "or by the root user.\n"
    )
    assert h200.ask("set_default_active_thread_percentage 10") == refused
    assert h200.ask("get_default_active_thread_percentage") == "100.0\n"
    assert h200.ask("quit") == "Not enough privilege to execute quit command\n"
    admin.set_fault("sim:h200", "driver", value="535.261.03")
    # That old daemon lets anybody change its settings.
    assert h200.ask("set_default_active_thread_percentage 10") == "10.0\n"


def test_a_stopped_daemon_answers_nobody_until_it_continues(h200: Mps, when_it_waits: WhenItWaits) -> None:
    pid = h200.start()
    h200.host.processes.send(pid, signal.SIGSTOP)
    with pytest.raises(TimedOut):
        h200.ask("get_server_list", timeout=0.05)
    waited = when_it_waits(lambda: h200.host.processes.send(pid, signal.SIGCONT))
    assert h200.ask("get_default_client_priority", timeout=120.0) == "0\n"
    assert waited


def test_compute_modes_shut_programs_out(h200: Mps) -> None:
    with h200.host.state_file.changed() as state:
        state.gpus[0].compute_mode = 3
    first = admin.add_process("sim:h200")
    with pytest.raises(OperationFailed, match="DEVICE_UNAVAILABLE"):
        admin.add_process("sim:h200")
    admin.end_process("sim:h200", first)
    h200.start()
    assert h200.client().mps_server == h200.client().mps_server
    # One that misses MPS gets no context: the guard that EXCLUSIVE_PROCESS is.
    with pytest.raises(OperationFailed, match="DEVICE_UNAVAILABLE"):
        admin.add_process("sim:h200")
    with h200.host.state_file.changed() as state:
        state.gpus[0].compute_mode = 2
    with pytest.raises(OperationFailed, match="DEVICE_UNAVAILABLE"):
        h200.client()


def test_a_stopped_daemon_for_all_users_lets_in_who_waited_once_it_continues(h200: Mps) -> None:
    assert h200.run("-d", "-M").exit_code == 0
    daemon = h200.state.daemons[0].pid
    server = h200.client(user="1000").mps_server
    h200.host.processes.send(daemon, signal.SIGSTOP)
    waiting = h200.client(user="1001")
    assert (waiting.mps_server, waiting.refused) == (None, None)
    h200.host.processes.send(daemon, signal.SIGCONT)
    assert h200.process(waiting.pid).mps_server == server


def test_no_simulated_line_goes_to_the_logs_of_the_machines_own_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_servers, "_OF_UNITS", (f"{tmp_path}/units/",))
    for name in ("units/gpu-0", "simulated"):
        (tmp_path / name).mkdir(parents=True)
        mps_servers.append_to_logs([mps_servers.LogLine(str(tmp_path / name), "control.log", "Control", 1, "a line")])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")] == ["simulated/control.log"]
