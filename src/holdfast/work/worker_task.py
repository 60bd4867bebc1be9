"""The worker's own tasks, which a handler cannot cancel.

A handler may cancel every task of its event loop. Cancelled runners are replaced (see
``runners``). But without the tasks that report, nobody would record the outcome of the
handler's job, and it would run again and again. So these tasks refuse cancellation by a
handler and by anything that it started. The surrounding program can still cancel them.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast import telemetry

T = TypeVar("T")
_in_handler = contextvars.ContextVar("holdfast_in_handler", default=False)
"""True in a runner's context; tasks and callbacks that a handler starts inherit it."""


class WorkerTask(asyncio.Task[T]):
    """A task that refuses cancellation by handlers; only ``end`` always works."""

    def cancel(self, msg: Any | None = None) -> bool:
        if _in_handler.get():
            telemetry.log.warning("work.cancellation_refused", task=self.get_name())
            return False
        return super().cancel(msg)

    def end(self) -> bool:
        """Cancel the task, as its owner."""
        return super().cancel()


def start(work: Coroutine[Any, Any, T], name: str) -> WorkerTask[T]:
    """Start a task of the worker, even if a handler is the
    one that starts the worker.
    """
    context = contextvars.copy_context()
    context.run(_in_handler.set, False)
    return WorkerTask(work, name=name, context=context)


def enter_handlers() -> None:
    """Mark the current task as one that runs handlers."""
    _in_handler.set(True)


def on_restart(task: asyncio.Task[Any]) -> None:
    """Log and count that the program cancelled a task, which is restarted."""
    telemetry.work_restarted()
    telemetry.log.error(
        "work.worker_restarted", task=task.get_name(), error="cancelled from outside"
    )
