"""What comes before any test is imported, and which tests this machine cannot run.

`make test` draws the same inputs every time. `--hypothesis-profile=drawn --hypothesis-seed=7` draws
others, and the same again for the same seed. Nothing here imports torch: the client's and the
server's tests run without it.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

from deft_libero.errors import GraphicsError
from deft_libero.simulator.graphics import Renderer, find_renderer

# One thread per worker: torch would otherwise start one per core in each of them. Tests of two
# threads let the other workers run while one thread waits for the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if shutil.which("nvidia-smi") is None:  # without a GPU its programs are interpreted
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("drawn", derandomize=False, database=None, deadline=None)
    settings.load_profile("fixed")


# Single tests of these modules run many programs. At the end of a run they would keep one worker
# busy while the others have nothing left to do.
LONG = {"test_compile_kernels.py", "test_documents.py", "test_first_hours.py", "test_gpu_run.py"}
LONG |= {"test_imports.py", "test_ray_workers.py", "test_wheels.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first. Skip those of the simulator where it is missing or cannot draw: say why."""
    items.sort(key=lambda item: item.path.name not in LONG)
    simulated = [item for item in items if item.get_closest_marker("libero")]
    reason = why_not_simulated() if simulated else None
    if reason is not None:
        for item in simulated:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not_simulated() -> str | None:
    """Why the simulator does not run here, if it does not."""
    if find_spec("robosuite") is None:
        return "needs the simulator: make install-libero"
    try:
        find_renderer(Renderer.AUTO)
    except GraphicsError as error:
        return str(error)
    return None
