"""Assets that the tests run on where LIBERO's own are not installed: scenes of boxes and cylinders.

They have the same files, bodies, sites, joints and regions; libero_90 has none. Nothing that is
measured on them says anything about LIBERO. `python -m tests.standins FOLDER` writes them.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

from tests.standins.build import MARKER, build, generate


@cache
def stand_ins() -> Path:
    """A folder of them, written once for all processes of a test run."""
    version = generate()[MARKER].decode().strip()
    folder = Path(tempfile.gettempdir()) / f"deft-stand-ins-{os.getuid()}-{version}"
    if not (folder / MARKER).is_file():
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="deft-stand-ins-new-"))
        build(aside)
        try:
            os.replace(aside, folder)
        except OSError:  # another process was first
            if not (folder / MARKER).is_file():
                raise
    return folder
