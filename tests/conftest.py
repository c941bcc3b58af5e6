"""Before anything imports Triton: without a GPU its programs are interpreted, launch by launch."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
