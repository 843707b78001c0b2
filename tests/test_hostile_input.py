"""Whatever a user types or gives as a file: one error of bounded length, in bounded time, never a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpushare.advice.case import read_case
from gpushare.base.errors import BadUsage, ExitCode, GpushareError, OperationFailed, cut, system_error
from gpushare.base.units import parse_memory_limit, parse_pinned_limits, parse_seconds, parse_thread_percentage, quoted
from gpushare.host.capabilities import parse_capability
from gpushare.host.cdi import _parse_yaml as parsed_cdi
from gpushare.host.machine import xids_in
from gpushare.host.process import container_of
from gpushare.hostfile.parse import parse as parse_host_file
from gpushare.inputs import documents
from gpushare.measure.bench_data import read_bench
from gpushare.measure.metric import number, parse_metric
from gpushare.measure.recording import read_recording
from gpushare.measure.ways import parse_copies, parse_ways
from gpushare.run.jobs import JOBS
from tests.cli.conftest import Cli, cli, plain_environment  # noqa: F401

LONG = "9" * 5000
HUGE = "1" + "0" * 4000
NUMBERS = [LONG, HUGE, f"-{LONG}", f"{LONG}.5", f"{LONG}e9", "1e400", "nan", "inf", "-inf", f"0x{LONG}", "٣" * 5000, ""]
UNITS = ["", "G", "M", "%", "s", "h", "x", ":1", "/n", "=1", ",1", "-1"]
YAML = [
    "!!timestamp 2001001-9",
    "!!timestamp 2001-99-99",
    "!!timestamp x",
    "!!int x",
    "!!int ''",
    "!!float ''",
    "!!float x",
    "!!bool x",
    "!!binary ä",
    "!!binary '='",
    "!!set {a, b}",
    "!!set [a]",
    "!!omap [a]",
    "!!pairs [a]",
    "!!null x",
    "!!python/object:os.system x",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "{{a: b}: c}",
    LONG,
    f"0x{LONG}",
    f"1:{LONG}",
    f"a: {LONG}.5e{LONG}",
    f"{LONG}-01-01",
    "[" * 5000,
    "{a: " * 5000,
    "- " * 5000,
    "&a [*a]",
    "&a {b: *a}",
    "<<: &a {<<: *a}",
    "a: &a {x: 1}\n" + "b: {<<: [" + "*a, " * 20000 + "*a]}",
    "a: &a [x, x, x, x, x, x, x, x]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 8)}]\n" for n in range(12)),
    "a: &a {k0: 1}\n"
    + "".join(f"m{n}: &m{n} {{<<: [*{'a' if not n else f'm{n - 1}'}], k{n}: 1, j{n}: 1}}\n" for n in range(800)),
    "a: *b",
    "\x00",
    "\ufeff\ufeff",
    "%YAML 9.9\n---\na",
    "key: 'unclosed",
    "x" * 20000,
    "'" + "x" * 20000 + "': 1",
]
TEXT = st.one_of(
    st.text(max_size=40),
    st.sampled_from(YAML),
    st.text(alphabet="!&*<>{}[]:,-?|'\"%@ \n\tabc019.x", max_size=60),
    st.tuples(st.sampled_from(NUMBERS), st.sampled_from(UNITS)).map("".join),
)
# Not shrunk: the texts are long, and each of them tells enough.
BOUNDED = settings(max_examples=60, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


def one_error(act: Callable[[], object]) -> None:
    """Run it: it answers, or refuses by one error of bounded length, and soon."""
    started = time.process_time()
    try:
        act()
    except GpushareError as error:
        assert len(error.message) <= 2000
        assert error.hint
    assert time.process_time() - started < 5


PARSERS: dict[str, Callable[[str], object]] = {
    "size": parse_memory_limit,
    "percentage": parse_thread_percentage,
    "duration": parse_seconds,
    "pinned": lambda text: parse_pinned_limits(text, "GPU-1"),
    "ways": parse_ways,
    "copies": parse_copies,
    "metric": parse_metric,
    "number": number,
    "yaml": lambda text: documents(text, "file", "give a file"),
    "gpushare.yaml": lambda text: parse_host_file(text, "file"),
    "workloads": lambda text: read_case(text, "file"),
    "cgroup": container_of,
    "xids": xids_in,
    "capability": lambda text: parse_capability("path", f"DeviceFileMinor: {text}\nDeviceFileMode: {LONG}"),
}


@pytest.mark.parametrize("parser", PARSERS)
@BOUNDED
@given(text=TEXT)
def test_each_parser_answers_or_refuses(parser: str, text: str) -> None:
    one_error(lambda: PARSERS[parser](text))


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
@pytest.mark.parametrize("parser", ["yaml", "gpushare.yaml", "workloads"])
def test_each_trap_of_yaml(parser: str, text: str) -> None:
    one_error(lambda: PARSERS[parser](text))
    one_error(lambda: PARSERS[parser](f"version: 1\ngpus:\n  0: {text}\n"))


@pytest.mark.parametrize("text", ["!!timestamp 2001001-9", "!!int x", "!!int ''", "!!float x", "!!bool x"])
def test_a_value_that_is_none_is_told_with_its_place(text: str) -> None:
    with pytest.raises(BadUsage, match=r"(?m)^file:2:5: this is not a valid (timestamp|int|float|bool)$"):
        documents(f"a: 1\nb:  {text}\n", "file", "hint")


@pytest.mark.parametrize("text", [one for one in YAML if "\x00" not in one], ids=range(len(YAML) - 1))
def test_each_trap_in_a_cdi_file(text: str) -> None:
    """It is read by libyaml, whose composer ends the process where a text is nested too deep."""
    for whole in (text, f"schema: {text}\n"):
        with contextlib.suppress(ValueError, RecursionError):
            parsed_cdi(whole)


@pytest.mark.parametrize("depth", [100_000])
@pytest.mark.parametrize("text", ["[", "- ", "{a: "])
def test_nothing_ends_the_process(text: str, depth: int) -> None:
    # Newer PyYAML refuses some of them itself.
    with pytest.raises((RecursionError, ValueError)):
        parsed_cdi(text * depth)


RAW = [
    LONG,
    HUGE,
    "1e400",
    "NaN",
    f"[{LONG}]",
    '{"a": ' * 3000,
    "[" * 100_000,
    '"' + "x" * 20_000 + '"',
    "{}",
    "",
    "\ud800",
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_a_file_of_json(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "file.json"
    header = '{"gpushare_recording": 1, "host": "h", "started_at": %s, "interval_seconds": 1, "gpus": []}\n'
    for whole in (raw, header % raw, (header % 1) + f'{{"t": {raw}, "gpus": [], "processes": []}}\n'):
        path.write_bytes(whole.encode(errors="surrogatepass"))
        one_error(lambda: read_recording(path))
        one_error(lambda: read_bench(str(path)))
        with contextlib.suppress(ValueError):
            JOBS._parse(path.read_bytes(), path, None)


# Every option with a number or a word of its own, as a user types it.
COMMANDS = [
    ("mps", "start", "--threads"),
    ("mps", "start", "--memory"),
    ("mps", "start", "--priority"),
    ("mps", "set", "--threads"),
    ("mps", "kill"),
    ("mps", "logs", "-n"),
    ("timeslice", "set"),
    ("farm", "--copies"),
    ("run", "--grace"),
    ("run", "--threads"),
    ("bench", "--copies"),
    ("bench", "--repeat"),
    ("bench", "--for"),
    ("tune", "--rounds"),
    ("tune", "--keep"),
    ("tune", "--p99"),
    ("observe", "--for"),
    ("observe", "--interval"),
    ("status", "--interval"),
    ("metrics", "--listen"),
    ("export", "k8s", "--replicas"),
    ("export", "slurm", "--node"),
    ("savings", "--price"),
    ("advise", "--processes"),
    ("advise", "--memory"),
    ("compare", "--driver"),
    ("explain",),
    ("mig", "name", "a"),
    ("mig", "destroy"),
    ("mig", "grant", "a"),
    ("apply", "-f"),
    ("diff", "-f"),
    ("advise", "--from"),
    ("sim", "add", "--memory"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("value", [LONG, f"{LONG}G", "x" * 15_000, "-" + LONG])
def test_a_long_word_is_one_short_error(cli: Cli, words: tuple[str, ...], value: str) -> None:  # noqa: F811
    answer = cli(*words, value, *(("--", "true") if words[0] in {"run", "bench"} else ()))
    assert answer.code != 0, answer
    assert "error: unexpected" not in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.lines("error")) == 1
    # A file is named whole.
    assert len(answer.err) < (5_000 if words[-1] in {"-f", "--from", "--price"} else 1_500)


@pytest.mark.parametrize("name", ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "COLUMNS"])
@pytest.mark.parametrize("value", [LONG, f"0={LONG}G", "nan"])
def test_a_long_number_in_the_environment(
    cli: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    for words in (("status",), ("doctor",), ("sim", "add")):
        answer = cli(*words)
        assert "unexpected" not in answer.err, answer


@given(st.text(max_size=300), st.integers(10, 80))
def test_what_is_quoted_is_short_and_tells_both_ends(text: str, most: int) -> None:
    shown = quoted(text, most)
    assert len(shown) <= most + 2
    assert shown == f"'{text}'" or (shown[1:4] == text[:3] and shown[-2] == text[-1])
    assert cut(text, 10_000) == text


@pytest.mark.parametrize(
    ("number", "path", "kind"),
    [
        (errno.ENOSPC, None, OperationFailed),
        (errno.EACCES, "/a b", GpushareError),
        (errno.EMFILE, None, OperationFailed),
        (errno.EIO, None, OperationFailed),
        (errno.ENOTDIR, "/a", OperationFailed),
        (errno.EINVAL, None, type(None)),
        (errno.EBADF, None, type(None)),
    ],
)
def test_what_the_system_refuses_is_told(number: int, path: str | None, kind: type) -> None:
    said = system_error(OSError(number, os.strerror(number), path))
    assert isinstance(said, kind)
    assert said is None or (said.code == "system_error" and said.exit_code in {ExitCode.FAILED, ExitCode.NO_PERMISSION})
    if path == "/a b":
        assert "'/a b'" in said.hint
