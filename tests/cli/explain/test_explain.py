"""``gpushare explain``: codes, names and log lines, each with meaning, cause, next command and source."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from gpushare.advice.explain import explain, explanations, own_codes
from gpushare.base.errors import ExitCode, NotFound
from gpushare.base.package import package_rows
from gpushare.cli import VERBS
from gpushare.cli.explain import explain as command
from gpushare.export import karpenter
from gpushare.mig.driver import HIDDEN, NOT_READ_BACK
from gpushare.mig.ledger import UNREADABLE
from gpushare.plan import NOT_RESTORED
from gpushare.show.legend import HEADS
from gpushare.sim.mps_servers import LogLine, render
from gpushare.sim.nvml_abi import ERROR_TEXTS
from tests.cli.drive import ROOT, Cli, Refused, World

# server.log of an H200 with driver 580.159.04, after a client was killed with a deep queue.
FAULT_LOG = """\
[2026-11-21 07:58:10.752 Server   510] Creating server context on device 0 (NVIDIA H200)
[2026-11-21 07:58:12.704 Server   510] Server failed to recevie command with status 806, assuming client {PID: 507, Context ID: 1} exit
[2026-11-21 07:58:12.704 Server   510] Server failed to recevie command with status 806, assuming client {PID: 508, Context ID: 1} exit
[2026-11-21 07:58:13.001 Server   510] Server teardown in progress. Refusing to accept new client {PID: 509, Context ID: 0}
[2026-11-21 07:58:13.001 Server   510] Failed to accept client {PID: 509, Context ID: 0} with status 807
"""


def titles(text: str) -> list[str]:
    return [one.title for one in explain(text)]


def test_every_explanation_is_whole() -> None:
    faults = {
        explanation.names[0] if explanation.names else explanation.pattern: fault
        for explanation in explanations()
        for fault, holds in {
            "sentences": explanation.meaning.endswith(".") and explanation.cause.endswith("."),
            "source": bool(explanation.source),
            "code": explanation.code is not None or explanation.kind == "concept" or explanation.pattern is not None,
            "names": explanation.kind in {"mps", "exit"} or bool(explanation.names),
            "next": bool(explanation.next)
            or explanation.cause in {"Normal.", "Hardware."}
            or explanation.kind == "mps",
        }.items()
        if not holds
    }
    assert len(explanations()) > 100
    assert faults == {}


def test_what_must_be_known_is() -> None:
    known = {(explanation.kind, explanation.code) for explanation in explanations()}
    assert {("cuda", code) for code in (*range(805, 812), 915, 2, 46, 100, 101, 201, 700, 719, 802, 803, 804)} <= known
    assert {("nvml", code) for code in (*range(31), 999)} <= known
    assert {("xid", code) for code in (13, 31, 43, 45, 63, 79, 94, 95, 109)} <= known
    codes = known - {("mps", None), ("concept", None)}
    assert len(codes) == sum(explanation.kind not in {"mps", "concept"} for explanation in explanations())


def test_each_exit_code_of_gpushare_and_the_signal_of_a_job_are_explained() -> None:
    for code in ExitCode:
        assert f"exit code {int(code)}" in titles(str(int(code)))
    assert explain("exit code 138")[0].meaning == "Signal 10 ended the program (128 + 10)."


def test_nvml_says_what_the_library_says() -> None:
    texts = {explanation.code: explanation.text for explanation in explanations() if explanation.kind == "nvml"}
    names = {explanation.code: explanation.names[0] for explanation in explanations() if explanation.kind == "nvml"}
    for code, text in ERROR_TEXTS.items():
        assert texts[int(code)] == text
    for code, name in names.items():
        assert getattr(pynvml, name, code) == code
    # nvmlErrorString of an H200, driver 580.159.04.
    said = """0 Success|14 Corrupted infoROM|17 GPU access blocked by the operating system|22 vGPU ECC not supported|
24 Invalid Frequency|26 Requested functionality has been deprecated|27 System is not in ready state|
28 No supported GPUs were found|29 Resource not in correct state to perform requested operation|
30 Reset type is not supported for given device"""
    for code, _, text in (line.partition(" ") for line in said.replace("\n", "").split("|")):
        assert texts[int(code)] == text


@pytest.mark.parametrize(("asked", "found"), [
    ("805", ["CUDA error 805"]), ("CUDA error 805", ["CUDA error 805"]), ("error 805", ["CUDA error 805"]),
    ("CUDA_ERROR_MPS_CONNECTION_FAILED", ["CUDA error 805"]), ("cudaErrorMpsConnectionFailed", ["CUDA error 805"]),
    ("mps client failed to connect to the MPS control daemon or the MPS server", ["CUDA error 805"]),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", ["CUDA error 700"]),
    # As cudaGetErrorString of the CUDA runtimes 12 and 13 has them.
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", ["CUDA error 46"]),
    ("CUDA error: MPS server is not ready to accept new MPS client requests", ["CUDA error 807"]),
    ("is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it",
     ["CUDA error 811"]),
    ("one or more resources are insufficient or non-applicable for the operation", ["CUDA error 915"]),
    ("torch.AcceleratorError: cudaErrorMpsRpcFailure (error code 806)", ["CUDA error 806"]),
    ("2", ["exit code 2", "CUDA error 2", "NVML return code 2"]), ("NVML 2", ["NVML return code 2"]),
    ("19", ["exit code 19", "NVML return code 19"]), ("NVML_ERROR_IN_USE", ["NVML return code 19"]),
    ("Not Found", ["NVML return code 6"]),
    ("Unable to destroy GPU instance ID 9 from GPU 0: In use by another client", ["NVML return code 19"]),
    ("Failed to initialize NVML: Driver/library version mismatch", ["NVML return code 18"]),
    ("Failed to initialize NVML: GPU access blocked by the operating system", ["NVML return code 17"]),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", ["CUDA error 2"]),
    ("RuntimeError: CUDA error: out of memory", ["CUDA error 2"]),
    ("all CUDA-capable devices are busy or unavailable", ["CUDA error 46"]),
    ("MPS client failed to connect", ["CUDA error 805"]),
    ("GPU requires restart", ["NVML return code 16"]),
    ("pynvml.NVMLError: RM has detected an NVML/RM version mismatch.", ["NVML return code 18"]),
    ("Server encountered a fatal exception. Shutting down", ["MPS log line"]), ("Hyper-Q", ["concept"]),
    ("Xid 31", ["Xid 31"]), ("xid 79", ["Xid 79"]), ("143", ["exit code 143", "Xid 143"]),
    ("exit code 143", ["exit code 143"]), ("exit code 19", ["exit code 19"]), ("exit status 137", ["exit code 137"]),
    ("SIGTERM", ["exit code 143"]), ("exit code 138", ["exit code 138"]), ("exit code 77", ["exit code 77"]),
    ("never seen attached to MPS", ["concept"]),
    ("NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.", ["Xid 79"]),
    ("NVRM: Xid (PCI:0000:01:00): 31, pid=812, name=python3, Ch 00000008, MMU Fault: ENGINE", ["Xid 31"]),
])  # fmt: skip
def test_codes_names_and_pasted_lines(asked: str, found: list[str]) -> None:
    assert titles(asked) == found


def test_a_real_log() -> None:
    matches = explain(FAULT_LOG)
    assert [match.lines for match in matches] == [1, 2, 1, 1]
    assert "{PID: 507" in matches[1].line
    assert "807" in matches[3].meaning


def test_lines_of_the_simulated_daemon(cli: Cli, world: World) -> None:
    """Whatever the daemon and the server write in a life with a fault and a waiting client is known."""
    cli("mps", "start").ok()
    victim = world.client(queue_seconds=0.5)
    world.client(queue_seconds=0.5)
    world.client(user="nobody")
    world.send(victim, signal.SIGKILL)
    directory = Path(world.state.daemons[0].log_directory)
    lines = [line for name in ("control.log", "server.log") for line in (directory / name).read_text().splitlines()]
    assert len(lines) > 20
    unknown = []
    for line in lines:
        # What is listed below "The following clients", and replies to commands, are bare values.
        if re.fullmatch(r"\[[^]]*\] [\d.]*", line):
            continue
        try:
            explain(line)
        except NotFound:
            unknown.append(line)
    assert unknown == []


# Seen on an H200 while a client of another user waited, and at the end of the daemon. "trigging" is its own spelling.
H200_LOG = """\
[2026-11-21 12:50:30.411 Control   940] Try shutting down server 956, backoff is disabled
[2026-11-21 12:50:30.412 Control   940] Server 956 has 2 active worker threads. Server will not shutdown.
[2026-11-21 12:50:30.412 Control   940] Control will try shutting down server 956 again in at most 200ms
[2026-11-21 12:50:30.412 Server   956] Server was unable to shutdown due to 2 active clients
[2026-11-21 12:50:43.026 Server   956] Waiting for current clients to finish
[2026-11-21 12:50:43.026 Server   956] Exiting
[2026-11-21 07:58:13.001 Server   510] All clients belonging to error trigging process 507 will be torn down
[2026-11-21 12:49:55.554 Control   434] quit command issued with timeout of 1
"""


def test_lines_of_an_h200() -> None:
    # The form of a line does not matter.
    bare, line = "NEW SERVER 1: Ready", LogLine("/nowhere", "control.log", "Control", 7, "NEW SERVER 1: Ready")
    lines = [*H200_LOG.splitlines(), bare, render(line, 0.0)]
    assert {line: titles(line) for line in lines} == {line: ["MPS log line"] for line in lines}


@pytest.mark.parametrize("asked", ["", "hello there, all is well", "\n\n", "--memory 4G exceeded", "nofile.log"])
def test_unknown(refused: Refused, asked: str) -> None:
    refused("explain", "--", asked, code="not_explained", exit_code=6)
    with pytest.raises(NotFound):
        explain(asked)


def test_the_command(cli: Cli) -> None:
    answer = cli("explain", "805", host=None).ok()
    assert "CUDA_ERROR_MPS_CONNECTION_FAILED" in answer.out
    assert all(word in answer.out for word in ("means", "cause", "next", "gpushare doctor", "source"))
    assert max(map(len, answer.out.splitlines())) <= 80
    (found,) = cli("explain", "Xid", "31", host=None, output="json").data["explanations"]
    assert (found["title"], found["kind"], found["code"]) == ("Xid 31", "xid", 31)
    assert found["next"]


NORMAL = "[2026-11-21 07:58:10.752 Control   510] NEW SERVER 512: Ready\n"


def test_a_log_begins_with_a_verdict_and_normal_lines_are_for_verbose(
    cli: Cli, refused: Refused, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(NORMAL * 2 + FAULT_LOG)
    answer = cli("explain", str(log), host=None).ok()
    assert answer.out.startswith("verdict: The server is recovering from a fatal fault")
    assert "line 6 of 7; 2 kinds of errors in all." in " ".join(answer.out.split())
    assert "NEW SERVER" not in answer.out
    whole = " ".join(cli("explain", "-v", str(log), host=None).ok().out.split())
    assert "NEW SERVER 512: Ready (and 1 more like it)" in whole
    data = cli("explain", str(log), host=None, output="json").ok().data
    assert data["lines"] == 7
    assert data["explanations"][0]["normal"]
    log.write_text(NORMAL)
    assert cli("explain", str(log), host=None).ok().out.startswith("verdict: nothing is wrong: 1 line")
    log.write_text("all is well\n")
    refused("explain", str(log), code="not_explained", exit_code=6)


@pytest.mark.parametrize(
    ("words", "title"),
    [(words, "throttled") for words in ("slow", "slowdown", "throttle", "thermal", "HW Slowdown", "SW thermal slowdown")]
    + [("lost", "lost"), ("Killed", "exit code 137"), ("Out of memory: Killed process 4711 (python3)", "exit code 137"),
       ("train.sh: line 3:  4711 Killed                  python3 train.py", "exit code 137")],
)  # fmt: skip
def test_words_that_a_user_sees_first(cli: Cli, words: str, title: str) -> None:
    assert title in cli("explain", words, host=None).ok().out.splitlines()[0]


def test_a_log_may_be_large_and_not_text(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with log.open("wb") as file:
        for step in range(20_000):
            file.write(b"[2026-11-21 07:58:10] step %d of many, loss 0.123%d\n" % (step, step))
        file.write(b"\xff\xfe\x00" + b"x" * 200_000 + b"\nRuntimeError: CUDA error: out of memory\n")
    assert log.stat().st_size > 1 << 20
    assert "CUDA_ERROR_OUT_OF_MEMORY" in cli("explain", str(log), host=None).ok().out


@pytest.mark.parametrize("words", [(), ("-",)])
def test_a_log_comes_through_a_pipe(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpushare", "explain", *words],
        input=FAULT_LOG,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("verdict: ")


def test_control_characters_of_a_log_do_not_reach_the_terminal(cli: Cli) -> None:
    answer = cli("explain", "NEW SERVER 1: Ready \x1b[31m", host=None).ok()
    assert "\x1b" not in answer.out


def codes_in_use() -> set[str]:
    """Return the error codes in the source: arguments and defaults called code, class attributes, and constants."""
    values: list[ast.expr | None] = []
    for node in nodes():
        if isinstance(node, ast.Call):
            values += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        elif isinstance(node, ast.FunctionDef):
            pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            values += [default for argument, default in pairs if argument.arg == "code"]
        elif isinstance(node, ast.ClassDef):
            own = [one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)]
            targets = [ast.unparse(one.targets[0] if isinstance(one, ast.Assign) else one.target) for one in own]
            values += [one.value for one, target in zip(own, targets, strict=True) if target == "code"]
    # One of two: code=first.reason or "copy_failed", or code="nvml" if text else "smi".
    values = [one for value in values for one in (value.values if isinstance(value, ast.BoolOp) else [value])]
    values = [
        one for value in values for one in ((value.body, value.orelse) if isinstance(value, ast.IfExp) else [value])
    ]
    found = {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    constants = {NOT_RESTORED, HIDDEN, NOT_READ_BACK, UNREADABLE, "journal_unwritable", "lease_unusable"}
    refusals = {row["code"] for row in package_rows("channel-refusals.yaml").values()}
    rows = {row[3] for row in vars(karpenter).values() if isinstance(row, tuple) and len(row) == 4}
    return found | constants | refusals | rows


def nodes() -> Iterator[ast.AST]:
    """Yield all nodes of the source."""
    for path in (ROOT / "gpushare").rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_every_error_code_of_gpushare_is_explained() -> None:
    assert codes_in_use() == set(own_codes())


@pytest.mark.parametrize(("code", "says", "never"), [
    ("under_mps", "share what belongs to their server", "died"),
    ("serves_clients", "share what belongs to their server", "died"), ("limit_above_gpu", "too small", "daemon"),
    ("no_acl", "file system", "daemon"), ("memory_limit", "held more memory than it was given", "layout"),
    ("time_limit", "time that it was given", "memory"), ("never_fits", "Even an empty GPU", "Other jobs"),
    ("no_room", "Other jobs", "Even an empty"), ("needs_consent", "Nobody agreed", "not allowed"),
    ("not_confirmed", "Nobody agreed", "not allowed"), ("no_permission", "not allowed to do this", "in use"),
    ("name_taken", "The name is taken", "another user"), ("over_user_limit", "Root has set a limit", "lease"),
    ("reserved", "lease", "gpushare.yaml"), ("no_user", "user or the group", "GPU"),
    ("command_not_found", "program to run", "container"), ("no_row", "not one that gpushare", "ended"),
    ("job_lost", "put the job back", "expects"), ("interrupted", "Ctrl-C", "measure"),
    ("too_large", "that is named", "gpushare keeps"), ("timeout", "within the time", "NVIDIA"),
])  # fmt: skip
def test_the_cause_of_a_code_is_its_own(code: str, says: str, never: str) -> None:
    explanation = own_codes()[code]
    assert says in explanation.cause
    assert never not in explanation.cause


def test_what_fails_halfway_is_not_said_to_have_changed_nothing() -> None:
    """A refusal comes before anything is done; these errors may come later."""
    late = {"OperationFailed", "NotHeld", "TimedOut", "Interrupted"}
    calls = [node for node in nodes() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    words = [word for call in calls if ast.unparse(call.func) in late for word in call.keywords if word.arg == "code"]
    codes = {word.value.value for word in words if isinstance(word.value, ast.Constant)}
    assert [code for code in codes if "Nothing was" in own_codes()[code].cause] == []


def test_the_next_command_of_each_code_exists() -> None:
    lines = [line for explanation in own_codes().values() for line in explanation.next if line.startswith("gpushare ")]
    assert sorted({line.split()[1] for line in lines} - VERBS.keys() - {"COMMAND", "--debug"}) == []


def test_every_error_code_has_one_meaning() -> None:
    """YAML takes the last of two keys, without a word."""
    lines = (ROOT / "gpushare" / "data" / "error-codes.yaml").read_text(encoding="utf-8").splitlines()
    codes = [line.split(":")[0].strip() for line in lines if line.startswith("    ")]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize("text", ["in_use", "code in_use", '"code": "in_use",', "gpushare error in_use"])
def test_a_code_of_gpushare_as_it_is_printed(cli: Cli, text: str) -> None:
    (one,) = cli("explain", text, output="json").ok().data["explanations"]
    assert (one["kind"], one["names"], one["title"]) == ("gpushare", ["in_use"], "gpushare error")
    assert "gpushare status" in one["next"]


@pytest.mark.parametrize(
    "text", ["No space left on device", "full disk", "OSError: [Errno 28] No space left on device: '/run/x'"]
)
def test_a_full_disk_is_explained(text: str) -> None:
    (match,) = explain(text)
    assert match.names[0] == "full disk"
    assert "gpushare doctor" in match.next


# What the documents of GPU sharing name: the course on MPS, the tables of ways, the guides for Kubernetes and their cost.
NAMED = """CUDA streams|stream priority|time-slicing|compute preemption|context switching|jitter|latency|OOM|compute-policy|
nvidia-smi|Hyper-Q|MPI rank|CUDA_MPS_PINNED_DEVICE_MEM_LIMIT|CUDA_MPS_ACTIVE_THREAD_PERCENTAGE|CUDA_VISIBLE_DEVICES|
CUDA_MPS_PIPE_DIRECTORY|error isolation|memory protection|QoS|GPU instance|compute instance|copy engine|vGPU|IOMMU|SR-IOV|
live migration|VDI|IPC|telemetry|thread block|grid|shared memory|L1 cache|default stream|TGS|REEF|AntMan|opportunistic|
production|best-effort|memory oversubscription|adaptive rate control|proxy kernel|register file|warp|device plugin|GPU operator|
replicas|Karpenter|taint|NodePool|EC2NodeClass|ConfigMap|DCGM|dcgm-exporter|Spark|Jupyter|HPC|CUDA graphs|NCCL|peer-to-peer|
unified memory|placement|memory slice|nvidia-cuda-mps-control|MPS server|EXCLUSIVE_PROCESS|persistence mode|Xid|ECC|NVLink|PCIe|
memory bandwidth|cgroup|container toolkit|CDI|farm|GPU farming|p99|lease|requeue|SHORT|MEDIUM|LONG|multi-tenancy|EKS|consolidation|drift|pause"""
# On the screens of top, observe and savings, and other words for these.
WORDS = """plain|prod|opport|MPS+slicing|THR%|MEM|RAM|unlisted memory|underused|pattern|p95|busy %|fullest|M+C|slice|GI|util|
threads|thread percentage|Time Slicing|sm|context switch|MPI with MPS|Python threads"""


def test_what_the_documents_and_screens_name_is_explained() -> None:
    concepts = [explanation for explanation in explanations() if explanation.kind == "concept"]
    names = {name.lower() for explanation in concepts for name in explanation.names}
    assert [name for name in NAMED.replace("\n", "").split("|") if name.lower() not in names] == []
    words = [
        *WORDS.replace("\n", "").split("|"),
        "mps",
        "time-slicing",
        "warp",
        "shared memory",
        "vGPU",
        "DCGM",
        "NCCL",
    ]
    assert {word: [match.kind for match in explain(word)] for word in words} == {word: ["concept"] for word in words}
    # By one of its names, so that nobody has to guess them.
    text = " ".join((command.__doc__ or "").split())
    assert [concept.names for concept in concepts if not any(name in text for name in concept.names)] == []


def test_every_column_is_explained_by_its_head(cli: Cli) -> None:
    for head, meaning in HEADS.items():
        explained = cli("explain", head.lower(), output="json").ok().data["explanations"]
        assert explained[0]["meaning"] == f'{meaning} "-" means unknown or none.'


def test_what_nobody_explains_has_one_hint(refused: Refused) -> None:
    said = refused("explain", "ValueError: bad seed", code="not_explained", exit_code=6)
    assert "no explanation found for" in said
    assert "what a job printed: gpushare logs JOB" in said
