"""A share under MPS that is opened more than once."""

from __future__ import annotations

from dataclasses import replace

from gpushare.base.selection import Device
from gpushare.host.host import Host
from gpushare.mps.home import own_home
from gpushare.mps.limits import Limits
from gpushare.run.share import MpsShare


def test_a_share_that_is_opened_again_starts_a_daemon_in_place_of_one_that_has_ended(
    host: Host, device: Device
) -> None:
    of_another = MpsShare(host, device, Limits())
    of_another.open()
    mine = replace(host, run_directory=host.run_directory.parent / "mine", shared_run_directories=(host.run_directory,))
    share = MpsShare(mine, device, Limits())
    share.open()
    assert share.home.directory == of_another.home.directory
    share.close()
    of_another.close()
    share.open()
    assert share.home.directory == own_home(mine, device.uuid).directory
    assert share.environment({})["CUDA_MPS_PIPE_DIRECTORY"] == str(share.home.pipe)
    share.close()
