"""`m1clip stop`: ask a run's own process to save and leave."""

from __future__ import annotations

import time
from pathlib import Path

from m1clip.errors import UserError
from m1clip.owner import read_owner
from m1clip.runlog import NAME, RunLog
from m1clip.watch.history import History
from m1clip.watch.state import need_run, status_of


def stop_run(run: Path, wait: float) -> str:
    """SIGTERM to the verified process; waits until it is gone, and says where the run stands."""
    owner = read_owner(need_run(run))
    process = owner.process() if owner else None
    if owner is not None and process is None and not owner.here:
        raise UserError(f"{run}: it was started on {owner.host}; stop it there")
    if owner is None or process is None:
        raise UserError(f"{run}: nothing to stop: it {status_of(History(run).poll_all()).words}")
    process.terminate()
    begin = time.monotonic()
    while owner.process() is not None:  # unlike process.wait, a zombie that nobody has reaped counts as gone
        if time.monotonic() - begin > wait:
            raise UserError(
                f"{run}: process {process.pid} was asked to stop {wait:g} s ago and is still at its step; "
                f"it will stop by itself, or wait longer with --wait {10 * wait:g}"
            )
        time.sleep(0.05)
    if not run.exists():
        return f"{run}: stopped while it prepared its data; nothing had been trained, so the folder is gone"
    history = History(run).poll_all()
    status = status_of(history)
    if status.state == "died" and (run / NAME).is_file():
        # Asked before its first step or after its last one, where no step is left to save.
        log = RunLog(run)
        log.write("event", step=history.step, event="stopped by m1clip stop")
        log.close()
    if status.state == "finished":
        return f"{run}: had just finished"
    took = time.monotonic() - begin
    return f"{run}: stopped at step {history.step:,} after {took:.1f} s; continue with: m1clip train --resume {run}"
