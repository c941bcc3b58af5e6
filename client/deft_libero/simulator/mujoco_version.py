"""Which MuJoCo the published results come from, and what another one changes. Imports no MuJoCo."""

from collections.abc import Sequence
from importlib import metadata

PUBLISHED = "3.3.2"
_FRAMES_CHANGED_IN = (3, 3, 3)
_CONTACTS_CHANGED_IN = (3, 4, 0)
_UPSET_SUITE = "libero_spatial"


def installed_mujoco() -> str | None:
    """The version that is installed, None where there is none."""
    try:
        return metadata.version("mujoco")
    except metadata.PackageNotFoundError:
        return None


def differences(version: str) -> list[str]:
    """What is not as in the published results, in words; empty where nothing is known."""
    found = []
    if _numbers(version) >= _FRAMES_CHANGED_IN:
        found.append("frames are rendered differently (LIBERO-Object fell from 88 to 70 % by it)")
    if _numbers(version) >= _CONTACTS_CHANGED_IN:
        found.append("in task 5 of libero_spatial the bowl slides off the ramekin's middle")
    return found


def warning(version: str) -> str | None:
    """What to tell somebody who plays LIBERO with this version; None where all is well."""
    changes = " and ".join(differences(version))
    if not changes:
        return None
    return (
        f"with MuJoCo {version} {changes}; success rates do not compare with published ones. "
        f"Install mujoco=={PUBLISHED}"
    )


def refused_suites(suites: Sequence[str], version: str) -> list[str]:
    """Those of the suites whose episodes do not begin as LIBERO means them to."""
    if _numbers(version) < _CONTACTS_CHANGED_IN:
        return []
    return [suite for suite in suites if suite == _UPSET_SUITE]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
