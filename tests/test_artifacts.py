"""What tools.generate writes is fresh; the manual page and the completions are well-formed, and of use at TAB."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpushare import __version__
from gpushare.base.errors import ExitCode
from tools import generate
from tools.tree import command_tree

PROJECT = Path(__file__).resolve().parent.parent
PAGES = [f"man/gpushare{part}.1" for part in ("", "-mps", "-mig", "-timeslice", "-export", "-sim", "-swap")]
BASH = PROJECT / "completions" / "gpushare.bash"


def run(argv: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8", **environment},
    )


def test_checked_in_files_are_what_would_be_written_now() -> None:
    assert generate.stale() == [], "write them again: python -m tools.generate"


def test_check_says_which_file_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {name: f"{name}\n" for name in ("man/gpushare.1", "completions/_gpushare", "README.md")}
    monkeypatch.setattr(generate, "artifacts", texts.copy)
    generate.write(tmp_path)
    assert generate.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "man/gpushare.1").write_text("old")
    (tmp_path / "completions/_gpushare").unlink()
    assert generate.main(["--check", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "man/gpushare.1" in said
    assert "completions/_gpushare" in said
    assert "README.md" not in said


def test_the_manual_names_every_command_option_and_exit_code() -> None:
    pages = "\n".join((PROJECT / name).read_text() for name in PAGES)
    page = pages.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    assert f"gpushare {__version__}" in page
    for node in command_tree().walk():
        assert f"gpushare {node.title}".strip() in page
        for option in node.options:
            assert f"\n{', '.join(option.names)}" in page, (node.title, option.names)
    for code in ExitCode:
        assert f"\n{int(code)}\n" in page
    for section in ("NAME", "SYNOPSIS", "ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"):
        assert f"\n.SH {section}\n" in page


def test_there_is_a_page_for_each_group_and_examples_come_first() -> None:
    groups = [node.title for node in command_tree().children if node.children]
    assert sorted(PAGES) == sorted(["man/gpushare.1", *(f"man/gpushare-{group}.1" for group in groups)])
    assert sorted(path.name for path in (PROJECT / "man").iterdir()) == sorted(Path(name).name for name in PAGES)
    for name in PAGES:
        sections = [line for line in (PROJECT / name).read_text().splitlines() if line.startswith(".SH ")]
        first = [".SH NAME", ".SH SYNOPSIS", ".SH EXAMPLES", ".SH DESCRIPTION"]
        assert sections[: len(first)] == first


def test_every_command_and_option_has_help() -> None:
    for node in command_tree().walk():
        assert node.short_help, node.title
        for option in node.options:
            assert option.help, (node.title, option.names)


def test_the_manual_has_no_macro_by_accident() -> None:
    known = {".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi", ".B", ".BR", '.\\"'}
    for line in "\n".join((PROJECT / name).read_text() for name in PAGES).splitlines():
        assert not line.startswith("'")
        assert not line.startswith(".") or line.split()[0] in known, line


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_mandoc_finds_nothing_in_the_manual(name: str) -> None:
    done = run(["mandoc", "-T", "lint", "-W", "style", str(PROJECT / name)])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("shell", "name"), [("bash", "gpushare.bash"), ("zsh", "_gpushare"), ("fish", "gpushare.fish")]
)
def test_the_shell_accepts_its_completion(shell: str, name: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = run([shell, "-n", str(PROJECT / "completions" / name)])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder for PATH with a gpushare that knows two GPUs and notes how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_in = folder / "gpushare"
    stand_in.write_text(
        f'#!/bin/sh\necho "$@" >>{folder}/calls\nprintf "gpu_index,gpu_uuid\\n0,GPU-aaaa,x\\n1,GPU-bbbb,y\\n"\n'
    )
    stand_in.chmod(0o755)
    return folder


def completed(line: str, folder: Path) -> list[str]:
    """Return what bash offers at the end of a line."""
    script = f'source "{BASH}"; COMP_LINE=$1; COMP_POINT=${{#1}}; _gpushare; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = run(["bash", "--norc", "-c", script, "bash", line], PATH=f"{folder}:{os.environ['PATH']}")
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpushare mps st", ["start", "stop", "status"]),
        ("gpushare --host sim:h200 mps st", ["start", "stop", "status"]),
        ("gpushare -o json -q mps sto", ["stop"]),
        ("gpushare --output=json mps sto", ["stop"]),
        ("gpushare mps start --prio", ["--priority"]),
        ("gpushare mps start --threads 50 --priority ", ["normal", "low"]),
        ("gpushare mps start --priority=l", ["low"]),
        ("gpushare -o j", ["json"]),
        # Bash replaces only what is behind the last colon.
        ("gpushare --host sim:h200-", ["h200-nvl"]),
        ("gpushare status --threads 3", []),
        ("gpushare status -w --gp", ["--gpu"]),
        ("gpushare advise --users d", ["different"]),
        ("gpushare advise --needs nc", ["nccl"]),
        ("gpushare advise --needs nccl,gr", ["nccl,graphics"]),
        ("gpushare compare vg", ["vgpu"]),
        ("gpushare mig fits --model h200-n", ["h200-nvl"]),
        ("gpushare sim fault los", ["lost"]),
        ("gpushare nonsense --pri", []),
    ],
)
def test_bash_offers(line: str, offered: list[str], programs: Path) -> None:
    assert completed(line, programs) == offered
    assert not (programs / "calls").exists(), "no Python may start at TAB for what is static"


def test_bash_offers_every_command(programs: Path) -> None:
    for node in command_tree().walk():
        if node.children:
            line = " ".join(["gpushare", *node.path, ""])
            assert completed(line, programs) == [child.path[-1] for child in node.children]
        names = [name for option in node.options for name in option.names if name.startswith("--")]
        assert completed(" ".join(["gpushare", *node.path, "--"]), programs) == names


def test_bash_asks_for_the_gpus_of_the_host_that_is_named(programs: Path) -> None:
    offered = ["0", "1", "GPU-aaaa", "GPU-bbbb", "all"]
    assert sorted(completed("gpushare --host sim:2xt4 mps stop -g ", programs)) == offered
    assert (programs / "calls").read_text().split() == ["--host", "sim:2xt4", "status", "-o", "csv"]
    assert completed("gpushare mps stop -g GPU-b", programs) == ["GPU-bbbb"]


def test_bash_offers_levels_and_jobs_for_a_time_slice(programs: Path) -> None:
    assert {"default", "short", "medium", "long"} < {*completed("gpushare timeslice set ", programs)}
    assert (programs / "calls").read_text().split() == ["jobs", "-a", "-o", "csv"]
    assert completed("gpushare timeslice set --gpu 0 m", programs) == ["medium"]


@pytest.fixture
def cut(programs: Path, sim_dir: Path) -> Path:
    """Return the folder with the real program, and a host with an instance of a name and a client of MPS."""
    from tests.cli.drive import World

    del sim_dir
    program = programs / "gpushare"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpushare "$@"\n')
    world = World.new("sim:2xh200")
    world.mig("1g.18gb:0", "1g.18gb:1")
    world.run("mig", "name", "alice", "1g.18gb:0", "-g", "0")
    world.run("mps", "start", "-g", "1")
    (programs / "pid").write_text(str(world.client(1)))
    return programs


def test_bash_asks_for_names_profiles_and_clients(cut: Path) -> None:
    def offered(line: str) -> list[str]:
        return completed(f"gpushare --host sim:2xh200 {line}", cut)

    assert offered("mig env ") == offered("mig revoke al") == ["alice"]
    found = offered("mig destroy ")
    assert {"alice", "all"} < set(found)
    assert len([one for one in found if one.startswith("MIG-")]) == 2
    assert offered("mig apply 3g") == ["3g.71gb"]
    assert offered("run --mig al") == ["alice"]
    assert "7g.141gb" in offered("run --mig ")
    # By name or PID; also what gpushare did not start.
    pid = (cut / "pid").read_text()
    assert pid in offered("stop ")
    assert {pid, "list"} < set(offered("pause "))


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpushare mps st", ["start", "status", "stop"]),
        ("gpushare --host sim:h200 mps start --priority ", ["low", "normal"]),
        ("gpushare mps start --prio", ["--priority"]),
        ("gpushare mps stop -g GPU-b", ["GPU-bbbb"]),
        ("gpushare advise --users d", ["different"]),
    ],
)
def test_fish_offers(line: str, offered: list[str], programs: Path) -> None:
    script = f"source {PROJECT / 'completions' / 'gpushare.fish'}; complete -C $argv[1]"
    done = run(["fish", "--no-config", "-c", script, line], PATH=f"{programs}:{os.environ['PATH']}")
    assert done.stderr == ""
    assert [found.split("\t")[0] for found in done.stdout.splitlines()] == offered


# What an interactive zsh reads first; an unpacked one (GPUSHARE_TEST_ZSH is its root) finds its own parts by it.
_ZSH_START = """
[[ -n $ROOT ]] && module_path=($ROOT/usr/lib/*/zsh/*(/)) && fpath=($ROOT/usr/share/zsh/functions/**/*(/) $fpath)
fpath=($COMPLETIONS $fpath)
zmodload zsh/zle zsh/complete zsh/compctl zsh/computil zsh/parameter zsh/complist
setopt zle
autoload -Uz compinit; compinit -D -u
compadd() {
  local -a hits
  if [[ ${@[1,(i)(-|--)]} == *-[ADO]\\ * ]]; then builtin compadd "$@"; return; fi
  builtin compadd -A hits "$@" 2>/dev/null
  print -rl -- $hits >>$OFFERED
  builtin compadd "$@"
}
finished() { print -r -- THE-END >>$OFFERED }
comppostfuncs=(finished)
bindkey '^I' complete-word
print -r -- IT-$((1))-STARTED
"""


def completed_by_zsh(line: str, folder: Path) -> list[str]:
    """Return what an interactive zsh offers for TAB at the end of a line."""
    start, offered = folder / "zshrc", folder / "offered"
    start.write_text(_ZSH_START)
    offered.write_text("")
    environment = {
        **os.environ,
        "TERM": "dumb",
        "ZDOTDIR": str(folder),
        "HOME": str(folder),
        "OFFERED": str(offered),
        "COMPLETIONS": str(PROJECT / "completions"),
        "ROOT": os.environ.get("GPUSHARE_TEST_ZSH", ""),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)  # noqa: S606 - the test's own zsh
    said = b""

    def until(done: Callable[[], bool]) -> None:
        nonlocal said
        end = time.monotonic() + 20
        while not done():
            assert time.monotonic() < end, said.decode(errors="replace")
            if select.select([terminal], [], [], 0.02)[0]:
                said += os.read(terminal, 65536)

    try:
        os.write(terminal, f". {start}\n".encode())
        until(lambda: b"IT-1-STARTED" in said)
        os.write(terminal, f"{line}\t".encode())
        until(lambda: "THE-END" in offered.read_text())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return [line for line in offered.read_text().splitlines() if line and line != "THE-END"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpushare mps st", ["start", "stop", "status"]),
        ("gpushare --host sim:h200 mps start --priority ", ["normal", "low"]),
        ("gpushare mps start --prio", ["--priority"]),
        ("gpushare advise --users d", ["different"]),
    ],
)
def test_zsh_offers(line: str, offered: list[str], programs: Path) -> None:
    assert completed_by_zsh(line, programs) == offered


def test_every_option_with_a_file_offers_files(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").touch()
    for node in command_tree().walk():
        for option in node.options:
            if option.metavar in {"FILE", "DIR", "PATH"}:
                for name in option.names:
                    line = " ".join(["gpushare", *node.path, name, f"{tmp_path}/so"])
                    assert completed(line, programs) == [f"{tmp_path}/some.yaml"], line


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("/bin/bash", ".local/share/bash-completion/completions/gpushare"),
        ("/usr/bin/zsh", ".local/share/zsh/site-functions/_gpushare"),
        ("fish", ".config/fish/completions/gpushare.fish"),
    ],
)
def test_the_fast_completion_is_installed(shell: str, place: str, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "SHELL": shell, "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""}
    done = run([sys.executable, "-m", "gpushare", "--install-completion"], **home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {tmp_path}/{place}\n")
    sources = {"bash": "gpushare.bash", "zsh": "_gpushare", "fish": "gpushare.fish"}
    assert (tmp_path / place).read_text() == (PROJECT / "completions" / sources[Path(shell).name]).read_text()


def test_a_link_in_the_place_of_the_completion_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "SHELL": "bash", "XDG_DATA_HOME": ""}
    place = tmp_path / ".local/share/bash-completion/completions/gpushare"
    place.parent.mkdir(parents=True)
    for target in (tmp_path / "gone" / "gpushare", tmp_path / "other"):
        place.unlink(missing_ok=True)
        place.symlink_to(target)
        if target.parent == tmp_path:
            target.write_text("mine")
        assert run([sys.executable, "-m", "gpushare", "--install-completion"], **home).returncode == 0
        assert not place.is_symlink()
        assert place.read_text() == (PROJECT / "completions" / "gpushare.bash").read_text()
    assert (tmp_path / "other").read_text() == "mine"


def test_another_shell_has_no_completion(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "gpushare", "--install-completion"], HOME=str(tmp_path), SHELL="/bin/tcsh")
    assert done.returncode == 2
    assert "no completion for the shell tcsh" in done.stderr


def test_bash_is_silent_when_the_host_cannot_be_asked(programs: Path) -> None:
    (programs / "gpushare").write_text("#!/bin/sh\necho 'error: no driver' >&2\nexit 9\n")
    assert completed("gpushare mps stop -g ", programs) == ["all"]


@pytest.mark.parametrize("line", ["gpushare run -- gpush", "gpushare run --threads 25 -- gpush", "gpushare run gpush"])
def test_bash_offers_programs_to_run(line: str, programs: Path) -> None:
    # One that is on PATH twice, as in a virtual environment that is active, is named twice; bash shows it once.
    assert set(completed(line, programs)) == {"gpushare"}


def test_bash_offers_files_to_the_program(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert completed(f"gpushare run --threads 25 -- python {tmp_path}/tr", programs) == [f"{tmp_path}/train.py"]
    assert completed(f"gpushare run ls {tmp_path}/tr", programs) == [f"{tmp_path}/train.py"]
