"""Fresh processes for tests, with everything that takes long to import already there."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def fresh_processes(module: str) -> ForkServerContext:
    """Return how to start processes that hold no state of this one; `module` is the caller's.

    The server that forks them imports once for all. All tests name the same packages, because
    there is one server per process, and the first test starts it. dp-accounting is what a process
    needs to verify a plan.
    """
    context = multiprocessing.get_context("forkserver")
    reference = "dp_accounting.pld.privacy_loss_distribution"
    context.set_forkserver_preload([module, "torch._dynamo", reference])
    return context
