"""The account of a run that several processes take together; only the first one writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ownerwise.processes import Processes
from ownerwise.step.account import Account
from ownerwise.step.account_file import Balance


class SharedAccount:
    """An account that the first process writes for all.

    Guarantee: when `take` returns in any process, the step is on disk, so no process draws the
    noise of a step that is not counted. If the first process cannot write, all processes raise the
    same error.

    Args:
        processes: the processes; all of them must create the object and call `take`.
        opened: opens the account; called in the first process.
    """

    def __init__(self, processes: Processes, opened: Callable[[], Account]):
        self._processes = processes
        self._account: Account | None = None
        self._taken = 0  # steps that other processes may have taken, even if this one has not

        def first() -> tuple[Path, str]:
            account = self._account = opened()
            return account.folder, account.balance.run

        self.folder, self.run = processes.on_first(first)

    @property
    def balance(self) -> Balance:
        """The state of the account, which only the first process knows."""
        assert self._account is not None
        return self._account.balance

    def take(self, step: int, private: bool) -> None:
        """See `Account.take`."""

        def first() -> None:
            if self._account is not None:
                self._account.take(step, private)
                self._taken = max(self._taken, step + 1)

        self._processes.together(first)

    def settle(self, steps: int) -> None:
        """See `Account.settle`; it exchanges nothing, so one process may call it after an error."""
        if self._account is not None:
            self._account.settle(max(steps, self._taken))

    def close(self) -> None:
        """See `Account.close`."""
        if self._account is not None:
            self._account.close()
