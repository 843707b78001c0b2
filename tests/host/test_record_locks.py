"""Locks and records that cannot be written: what, why and what to do; never "a bug"."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare.base.errors import GpushareError, NoPermission, OperationFailed
from gpushare.connect import connect
from gpushare.host import records
from gpushare.mig.ledger import MigLedger, NamedInstance, changing_names
from gpushare.mps.home import DaemonHome, DaemonRecord, home_of
from tests.errors import fails

H200 = "sim:h200"
UUID = "GPU-0d54321e-a080-c56a-9a57-14e2f8d3a1d0"
RECORD = DaemonRecord(device_uuid=UUID, pid=7, started=15, uid=0)
TRAIN = NamedInstance(name="train", gpu_uuid=UUID, profile="3g.71gb", start=4)


@pytest.fixture
def home() -> DaemonHome:
    made = home_of(connect(H200).run_directory, UUID)
    made.create()
    return made


def hold_daemon() -> Path:
    home = home_of(connect(H200).run_directory, UUID)
    with home.locked():
        return home.directory / "lock"


def hold_names() -> Path:
    host = connect(H200)
    with changing_names(host):
        return host.state_directory / "names" / "lock"


def hold_ledger() -> Path:
    host = connect(H200)
    with MigLedger(host).locked():
        return host.run_directory / "mig" / "lock"


CODES = {hold_daemon: "file_unwritable", hold_names: "file_unwritable", hold_ledger: "journal_unwritable"}
LOCKS = pytest.mark.parametrize("hold", CODES)


@LOCKS
def test_a_directory_in_the_place_of_a_lock_is_said(hold: Callable[[], Path]) -> None:
    lock = hold()
    lock.unlink()
    lock.mkdir()
    with fails(OperationFailed, CODES[hold], message=str(lock), hint=f"ls -l {lock.parent}", match="Is a directory"):
        hold()


@LOCKS
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OperationFailed), (errno.EACCES, NoPermission), (errno.EROFS, NoPermission)]
)
def test_a_lock_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, hold: Callable[[], Path], number: int, kind: type[GpushareError]
) -> None:
    lock, real = hold(), os.open

    def refusing(path: Any, *rest: Any, **named: Any) -> int:
        if str(path) == str(lock):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(records.os, "open", refusing)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        hold()
    assert ("df -h" in caught.value.hint) == (number == errno.ENOSPC)
    assert ("sudo gpushare" in caught.value.hint) == (number != errno.ENOSPC)


@pytest.mark.parametrize("what", ["daemon.json", "names/mig.json", "lease"])
def test_a_record_for_which_there_is_no_room_is_said(
    monkeypatch: pytest.MonkeyPatch, home: DaemonHome, what: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        if what == "daemon.json":
            home.write(RECORD)
        elif what == "lease":
            home.take_lease()
        else:
            with changing_names(connect(H200)) as names:
                names["train"] = TRAIN

    connect(H200).state_directory.mkdir(parents=True, exist_ok=True)
    if what == "lease":
        monkeypatch.setattr(records.os, "open", full)
    else:
        monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(OperationFailed, match="No space left") as caught:
        write()
    assert what in caught.value.message
    assert "df -h" in caught.value.hint
