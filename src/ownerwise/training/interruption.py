"""Make Ctrl-C and SIGTERM take effect between steps, so no update is left incomplete."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)


class Interrupted(KeyboardInterrupt):
    """Raised when the user stops a run, which can be resumed from its folder."""


class Interruption:
    """Sets `requested` on the first Ctrl-C or SIGTERM; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in _DEFAULTS:
                    self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
