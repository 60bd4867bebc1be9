"""The worker's own tasks, which a handler cannot cancel.

A handler may cancel every task of its event loop. Its runner and the others are replaced then (see ``runners``); but if
the tasks that report ended, too, nobody would record what became of its job, and it would be run again and again.
So the worker's own tasks refuse to be cancelled by a handler or by anything it has started. Everybody else can cancel
them: whoever ends the program, say.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast import telemetry

T = TypeVar("T")
_in_handler = contextvars.ContextVar("holdfast_in_handler", default=False)
"""Set in a runner's context, which every task and callback that a handler starts inherits."""


class WorkerTask(asyncio.Task[T]):
    """See the module's text."""

    def cancel(self, msg: Any | None = None) -> bool:
        if _in_handler.get():
            telemetry.log.warning("work.cancellation_refused", task=self.get_name())
            return False
        return super().cancel(msg)

    def end(self) -> bool:
        """Cancel it, as its owner."""
        return super().cancel()


def start(work: Coroutine[Any, Any, T], name: str) -> WorkerTask[T]:
    """A task of the worker's own, also where a handler starts a worker."""
    context = contextvars.copy_context()
    context.run(_in_handler.set, False)
    return WorkerTask(work, name=name, context=context)


def enter_handlers() -> None:
    """What the current task runs from now on is handlers."""
    _in_handler.set(True)


def on_restart(task: asyncio.Task[Any]) -> None:
    """The program around the worker has cancelled a task of its own, and it is started again."""
    telemetry.work_restarted()
    telemetry.log.error("work.worker_restarted", task=task.get_name(), error="cancelled from outside")
