"""Properties draw what those of the product draw, and what this machine cannot run is skipped."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems as pytest_collection_modifyitems
from tiny_libero_recipe.train import main


@pytest.fixture
def teach() -> Callable[..., Path]:
    """Trains a policy for two steps beside its demonstrations, and returns the checkpoint."""

    def teach(demos: Path, name: str, *flags: str, answers: str, sizes: Mapping[str, int]) -> Path:
        where = [f"--run={demos.parent / name}", f"--out={demos.parent / f'{name}-checkpoint'}"]
        settings = [f"--set=fit.model.{key}={value}" for key, value in sizes.items()]
        settings += ["--set=fit.steps=2", "--set=fit.batch_size=4", "--threads=1"]
        assert main([str(demos), f"--answers={answers}", *where, *settings, *flags]) == 0
        return demos.parent / f"{name}-checkpoint"

    return teach
