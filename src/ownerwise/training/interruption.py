"""Make Ctrl-C take effect between steps, so that no update is left incomplete."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; it can be resumed from its folder."""


class Interruption:
    """Sets `requested` on the first Ctrl-C; a second one interrupts immediately, as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = None

    def __enter__(self) -> Self:
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if default and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
