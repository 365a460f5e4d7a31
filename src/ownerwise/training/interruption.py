"""Ctrl-C during a run: met between two steps, so that no update is left half-done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; its folder holds all that it needs to go on."""


class Interruption:
    """Notes the first Ctrl-C as `asked`; a second one acts at once, as it does everywhere else."""

    def __init__(self) -> None:
        self.asked = False
        self._before = None

    def __enter__(self) -> Self:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        self._give_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._give_back()

    def _give_back(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
