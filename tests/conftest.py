"""What comes before any test is imported: Triton's interpreter, and what properties draw from.

`make test` draws the same inputs every time. `--hypothesis-profile=drawn --hypothesis-seed=7` draws
others, and the same again for the same seed.
"""

import os
import shutil
from importlib.util import find_spec

if shutil.which("nvidia-smi") is None:  # without a GPU its programs are interpreted
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("drawn", derandomize=False, database=None, deadline=None)
    settings.load_profile("fixed")
