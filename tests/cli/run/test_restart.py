"""``gpushare run --restart-on mps-fault``: a client whose MPS server had a fatal error is started again, a few times."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cli.drive import Cli, Refused

# A client that fails; for the first tries as the servers' log shows it after a fatal error of a kernel.
CLIENT = """
echo try >> %s
%s -S -m gpushare.sim.job --seconds 0.3 >/dev/null
if [ $(wc -l < %s) -le %d ]; then
  echo "[2026-11-25 12:00:00.000 Server 4194306] Client {PID: 4267, Context ID: 0} encountered a fatal GPU error." \\
    >> $CUDA_MPS_PIPE_DIRECTORY/../log/server.log
fi
exit %d
"""


def client(path: Path, faults: int, code: int = 7) -> tuple[str, ...]:
    return "bash", "-c", CLIENT % (path, sys.executable, path, faults, code)


def test_a_client_is_started_again_after_a_fault_and_not_after_other_failures(
    cli: Cli, refused: Refused, tmp_path: Path
) -> None:
    refused("run", "--restart-on", "rain", "--", "true", code="bad_restart", exit_code=2)
    tries = tmp_path / "tries"
    answer = cli("run", "--restart-on", "mps-fault", "--threads", "50", "--", *client(tries, 1))
    # The second try failed by itself.
    assert (answer.code, tries.read_text().count("try")) == (7, 2)
    assert "its MPS server died: started again (1 of at most 3 times)" in answer.err
    tries.unlink()
    answer = cli("run", "--restart-on", "mps-fault", "--threads", "50", "--", *client(tries, 9))
    assert (answer.code, tries.read_text().count("try")) == (7, 4)
    assert "(3 of at most 3 times)" in answer.err
    tries.unlink()
    assert cli("run", "--threads", "50", "--", *client(tries, 9)).code == 7
    assert tries.read_text().count("try") == 1
