"""Threads that run one at a time, in an order that a seed decides, on a clock that moves only as they do."""

from __future__ import annotations

import _thread
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable

MOST_TURNS = 200_000
"""A story that takes more turns isn't going anywhere."""
_REMEMBERED = 60


class Killed(BaseException):
    """The process that this thread belongs to is dead. Not an Exception, so that no error handling survives it."""


class StuckError(AssertionError):
    """Nobody can go on, or nobody comes to an end."""


class Process:
    """Some threads that die, and freeze, together. `skew_s`: how much its wall clock is fast."""

    def __init__(self, name: str, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.frozen_until = 0.0


class Task:
    """One thread. `woken`: it may go on; else it waits until `deadline`, by the virtual clock."""

    def __init__(self, process: Process, name: str, function: Callable[[], None]) -> None:
        self.process = process
        self.name = f"{process.name}/{name}"
        self.function = function
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.woken = True
        self.deadline: float | None = None
        self.over = False
        self.joiners: list[Task] = []


class Scheduler:
    """Passes the turn among tasks. Whatever runs in a task may call its methods; nobody else.

    `switch`: how likely a task that could go on gives the turn away; `turn_s`: how much time a turn takes.
    """

    def __init__(self, seed: int, *, switch: float = 0.3, turn_s: float = 1e-4) -> None:
        self.rng = random.Random(seed)
        self._random = self.rng.random
        self.now = 0.0
        self.turns = 0
        self.trace = 0
        """A checksum of everything that has happened."""
        self.recent: deque[str] = deque(maxlen=_REMEMBERED)
        self.failure: BaseException | None = None
        self._switch = switch
        self._turn_s = turn_s
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._finished = _thread.allocate_lock()
        self._threads: set[int] = set()

    @property
    def runs_this_thread(self) -> bool:
        """Whether the thread that asks is a task's; others, left over from something else, aren't ours to hold."""
        return _thread.get_ident() in self._threads

    @property
    def current(self) -> Task:
        """The task that runs."""
        assert self._current is not None, "only a scheduled thread may do this"
        return self._current

    def run(self, story: Callable[[], None]) -> None:
        """Run `story` as the first task; once it has ended, so has everything that it started. Raises what it raised."""
        self._finished.acquire()
        main = Process("story")

        def play() -> None:
            try:
                story()
            except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to the caller
                self.fail(error)
            finally:
                for process in self.processes():
                    process.dead = process is not main

        first = self.spawn(main, "main", play)
        self._current = first
        first.baton.release()
        with self._finished:
            pass
        if self.failure is not None:
            raise self.failure

    def processes(self) -> list[Process]:
        """Those that have a thread."""
        return list(dict.fromkeys(task.process for task in self._tasks))

    def fail(self, error: BaseException) -> None:
        """The story went wrong: the first error counts, and everything is given up."""
        if isinstance(error, Killed):
            return
        self.failure = self.failure or error
        for process in self.processes():
            process.dead = True

    def spawn(self, process: Process, name: str, function: Callable[[], None]) -> Task:
        """Start a thread of a process; it gets its turn like all others."""
        task = Task(process, name, function)
        self._tasks.append(task)
        threading.Thread(target=self._body, args=(task,), name=task.name, daemon=True).start()
        return task

    def kill(self, process: Process) -> None:
        """SIGKILL: its threads never come back from where they are."""
        self.note(f"{process.name} is killed")
        process.dead = True
        if self.current.process is process:
            raise Killed

    def freeze(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.note(f"{process.name} is frozen for {seconds:.2f} s")
        process.frozen_until = self.now + seconds

    def note(self, what: str) -> None:
        """Something worth telling has happened; part of the trace."""
        self.trace = zlib.crc32(what.encode(), self.trace)
        self.recent.append(f"{self.now:10.4f} {what}")

    def pause(self) -> None:
        """A point where another task may come first."""
        task = self._current
        assert task is not None, "only a scheduled thread may do this"
        if task.process.dead:
            raise Killed
        if self._random() < self._switch:
            task.woken = True
            self._pass_on(task)

    def block(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken; False if the time is over before that."""
        task = self.current
        if task.process.dead:
            raise Killed
        task.woken = False
        task.deadline = None if timeout_s is None else self.now + max(timeout_s, 0.0)
        self._pass_on(task)
        return task.woken

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.block(seconds)

    def _body(self, task: Task) -> None:
        task.baton.acquire()
        self._threads.add(_thread.get_ident())
        try:
            if not task.process.dead:
                task.function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever plays the story
            self.fail(error)
        self._threads.discard(_thread.get_ident())
        task.over = True
        self._tasks.remove(task)
        for joiner in task.joiners:
            joiner.woken = True
        if self._tasks:
            self._choose().baton.release()
        else:
            self._finished.release()

    def _pass_on(self, task: Task) -> None:
        following = self._choose()
        if following is not task:
            following.baton.release()
            task.baton.acquire()
        if task.process.dead:
            raise Killed

    def _choose(self) -> Task:
        """Who runs next; time moves on to when somebody can."""
        self.turns += 1
        self.now += self._turn_s
        if self.turns > MOST_TURNS and self.failure is None:
            self.fail(StuckError(f"no end after {MOST_TURNS} turns"))
        ready, earliest = self._ready()
        if not ready:
            if earliest is None:
                self.fail(StuckError("nobody can go on: " + ", ".join(task.name for task in self._tasks)))
            else:
                self.now = earliest
            ready, _ = self._ready()
        chosen = ready[0] if len(ready) == 1 else ready[int(self._random() * len(ready))]
        self._current = chosen
        self.trace = zlib.crc32(chosen.name.encode(), self.trace)
        return chosen

    def _ready(self) -> tuple[list[Task], float | None]:
        """Who can run now, and from when on the first of the others could. The dead can: to come to their end."""
        now, ready, earliest = self.now, [], None
        for task in self._tasks:
            process = task.process
            at = 0.0 if task.woken else task.deadline
            if process.dead:
                at = 0.0
            elif at is None:
                continue
            elif at < process.frozen_until:
                at = process.frozen_until
            if at <= now:
                ready.append(task)
            elif earliest is None or at < earliest:
                earliest = at
        return ready, earliest
