"""`python -m tests.standins FOLDER` writes the stand-ins."""

import sys
from pathlib import Path

from tests.standins.build import build

build(Path(sys.argv[1]))
