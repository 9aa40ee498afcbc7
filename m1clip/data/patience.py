"""Work that may hang, such as a read from a network disk that has gone: done beside, waited for only so long.

A read that hangs in the kernel cannot be broken off; what can be done is to wait in another thread, and to leave the
one that hangs behind. Such a thread is a daemon: it does not keep the program from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from m1clip.errors import UserError

PATIENCE = 60.0  # seconds for one picture; 0 waits for ever
MOST_LEFT_BEHIND = 8  # threads of this process that hang: then it is the disk, not the picture

Item = TypeVar("Item")
Found = TypeVar("Found")
_left_behind: list[threading.Thread] = []


class _Shared(Generic[Item, Found]):
    """The items, who works on which since when, and what was found."""

    def __init__(self, items: Sequence[Item], work: Callable[[Item], Found]) -> None:
        self.items, self.work = items, work
        self.found: dict[int, Found] = {}
        self.error: BaseException | None = None
        self.next = 0
        self.busy: dict[threading.Thread, tuple[int, float]] = {}
        self.changed = threading.Condition()

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.found) == len(self.items)

    def run(self) -> None:
        me = threading.current_thread()
        while True:
            with self.changed:
                if self.next >= len(self.items) or self.error is not None:
                    return
                place, self.next = self.next, self.next + 1
                self.busy[me] = (place, time.monotonic())
            try:
                result = self.work(self.items[place])
            except BaseException as error:  # noqa: BLE001  given to the one who waits
                with self.changed:
                    if self.busy.pop(me, None) is not None:  # else given up on, and answered for
                        self.error = error
                        self.changed.notify()
                return
            with self.changed:
                if self.busy.pop(me, None) is None:
                    return  # given up on: another has taken over the rest
                self.found[place] = result
                if self.over:
                    self.changed.notify()


def patiently(
    items: Sequence[Item],
    work: Callable[[Item], Found],
    hung: Callable[[Item], Found],
    patience: float = PATIENCE,
    threads: int = 1,
    name: Callable[[Item], str] = str,
) -> list[Found]:
    """What `work` gives for each item, in order; `hung` answers for one that takes longer than `patience` seconds.

    `name` says to a person which item it is.
    """
    if not items:
        return []
    if patience <= 0 and threads == 1:
        return [work(item) for item in items]
    shared: _Shared[Item, Found] = _Shared(items, work)
    for _ in range(min(threads, len(items))):
        _start(shared)
    with shared.changed:
        while not shared.over:
            shared.changed.wait(_time_left(shared, patience))
            _give_up(shared, hung, patience, name)
    if shared.error is not None:
        raise shared.error
    return [shared.found[place] for place in range(len(items))]


def _start(shared: _Shared[Item, Found]) -> None:
    threading.Thread(target=shared.run, name="decode", daemon=True).start()


def _time_left(shared: _Shared[Item, Found], patience: float) -> float | None:
    if patience <= 0:
        return None
    oldest = min((since for _, since in shared.busy.values()), default=time.monotonic())
    return max(0.01, oldest + patience - time.monotonic())


def _give_up(
    shared: _Shared[Item, Found], hung: Callable[[Item], Found], patience: float, name: Callable[[Item], str]
) -> None:
    """Answer for those who hang, and start another in the place of each."""
    if patience <= 0 or shared.over:
        return
    now = time.monotonic()
    for thread, (place, since) in list(shared.busy.items()):
        if now - since < patience:
            continue
        del shared.busy[thread]
        shared.found[place] = hung(shared.items[place])
        _left_behind.append(thread)
        _left_behind[:] = [one for one in _left_behind if one.is_alive()]
        if len(_left_behind) > MOST_LEFT_BEHIND:
            raise UserError(
                f"{name(shared.items[place])}: the {len(_left_behind)}th read that hangs for more than {patience:g} s; "
                f"is the disk with the pictures still there? Continue with --resume when it is back"
            )
        _start(shared)
