"""Stands in for the modules `threading` and `time`, and for thread pools, in the product's own modules while a story is played."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import Any
from unittest.mock import patch

from tidemill.testing.simulation.scheduler import Scheduler, Task

EPOCH = 1_700_000_000.0
"""What the wall clock says as a story begins."""


class VirtualTime:
    """The module `time`; threads that aren't scheduled get the real one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def time(self) -> float:
        if not self._scheduler.runs_this_thread:
            return time.time()
        return EPOCH + self._scheduler.now + self._scheduler.current.process.skew_s

    def monotonic(self) -> float:
        return self._scheduler.now if self._scheduler.runs_this_thread else time.monotonic()

    def sleep(self, seconds: float) -> None:
        if self._scheduler.runs_this_thread:
            self._scheduler.sleep(seconds)
        else:
            time.sleep(seconds)


class VirtualLock:
    """`threading.Lock`, and with `reentrant` an RLock."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self) -> bool:
        self._scheduler.pause()
        me = self._scheduler.current
        while self._owner is not None and not (self._reentrant and self._owner is me):
            if self._owner.over or self._owner.process.dead:
                break
            self._waiting.append(me)
            self._scheduler.block()
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        if self._owner is not self._scheduler.current:
            return  # of a thread that was killed where it had given the lock away
        self._depth -= 1
        if not self._depth:
            self._owner = None
            for task in self._waiting:
                task.woken = True
            self._waiting.clear()

    def give_up(self) -> int:
        """Release it whole; how often it had been taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class VirtualCondition:
    """`threading.Condition`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = VirtualLock(scheduler, reentrant=True)
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me = self._scheduler.current
        self._waiting.append(me)
        depth = self._lock.give_up()
        notified = self._scheduler.block(timeout)
        if not notified and me in self._waiting:
            self._waiting.remove(me)
        self._lock.take_back(depth)
        return notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._scheduler.now + timeout
        while not (answer := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return answer

    def notify_all(self) -> None:
        for task in self._waiting:
            task.woken = True
        self._waiting.clear()


class VirtualEvent:
    """`threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._changed = VirtualCondition(scheduler)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class VirtualThread:
    """`threading.Thread`; it belongs to the process that starts it."""

    def __init__(self, scheduler: Scheduler, target: Callable[..., None], args: Iterable[Any], name: str) -> None:
        self._scheduler = scheduler
        self._call = lambda: target(*args)
        self.name = name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._scheduler.spawn(self._scheduler.current.process, self.name, self._call)
        self._scheduler.pause()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        until = None if timeout is None else self._scheduler.now + timeout
        while not self._task.over:
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                return
            me = self._scheduler.current
            self._task.joiners.append(me)
            if not self._scheduler.block(left):
                self._task.joiners.remove(me)


class VirtualThreading:
    """The module `threading`, as far as the product uses it; threads that aren't scheduled get the real one."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Thread(  # noqa: N802 - stands for the class
        self, *, target: Callable[..., None], args: Iterable[Any] = (), name: str = "thread", daemon: bool = True
    ) -> VirtualThread | threading.Thread:
        if not self._scheduler.runs_this_thread:
            return threading.Thread(target=target, args=args, name=name, daemon=daemon)
        return VirtualThread(self._scheduler, target, args, name)

    def Condition(self) -> VirtualCondition | threading.Condition:  # noqa: N802 - stands for the class
        return VirtualCondition(self._scheduler) if self._scheduler.runs_this_thread else threading.Condition()

    def Event(self) -> VirtualEvent | threading.Event:  # noqa: N802 - stands for the class
        return VirtualEvent(self._scheduler) if self._scheduler.runs_this_thread else threading.Event()

    def Lock(self) -> VirtualLock | threading.Lock:  # noqa: N802 - stands for the class
        return VirtualLock(self._scheduler) if self._scheduler.runs_this_thread else threading.Lock()


class InlinePool:
    """A thread pool whose work is done at once, by whoever submits it."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - the worker edge: the error goes to whoever asks for the result
            future.set_exception(error)
        return future


@contextmanager
def simulated(scheduler: Scheduler, modules: Iterable[ModuleType] | None = None) -> Iterator[None]:
    """While the block runs, the package's modules that are loaded get their threads, their time and their pools from the scheduler.

    What they made before keeps real ones, and so do threads that the scheduler doesn't know.
    """
    virtual = {id(threading): VirtualThreading(scheduler), id(time): VirtualTime(scheduler)}
    with ExitStack() as patches:
        for module in modules or product_modules():
            for name, stand_in in _stand_ins(vars(module), virtual).items():
                patches.enter_context(patch.object(module, name, stand_in))
        yield


def product_modules() -> list[ModuleType]:
    """All modules of the package that are loaded, but for the simulation's own."""
    own = "tidemill.testing.simulation"
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("tidemill.") and not name.startswith(own)]


def _stand_ins(names: Mapping[str, Any], virtual: Mapping[int, Any]) -> dict[str, Any]:
    found = {name: virtual[id(value)] for name, value in names.items() if id(value) in virtual}
    if "ThreadPoolExecutor" in names:
        found["ThreadPoolExecutor"] = InlinePool
    return found
