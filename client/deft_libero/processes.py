"""What the worker processes of evaluations, recordings and checks have in common."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process as soon as its parent is gone, whatever it is doing.

    A worker whose parent was killed would otherwise wait for work for ever.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def limit_threads() -> None:
    """One thread per worker and library: they share the cores, and fight over them otherwise.

    Must run before the first worker starts; what the user set wins.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
