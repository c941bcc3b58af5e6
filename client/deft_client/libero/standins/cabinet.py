"""The cabinet with three drawers, as bodies: shell, shelves, drawers with a bar to pull.

The drawers collide with the shell (it is welded to the world, so MuJoCo does not exempt them),
hence the clearances. The gap behind the bar takes a finger of the gripper.
"""

from collections.abc import Mapping

from deft_client.libero.standins.model import Asset, Body, Joint, Site
from deft_client.libero.standins.shapes import Part

_DRAWERS = (("top", 0.18563), ("middle", 0.1169), ("bottom", 0.04701))
_CENTRE_X = 0.0035
_PLACEMENT = (-0.045, 0.045, 0.045)
_STANDING = (0.70711, 0.0, 0.70711, 0.0)  # turns a region's z axis along the cabinet's x


def build_cabinet(path: str, colours: Mapping[str, str]) -> Asset:
    """A cabinet in four colours: shell, front, handle, inside."""
    top_side = Site("top_side", (0.00354, 0.01567, 0.22152), box=(0.12534, 0.09438, 0.00147))
    base = Body(
        "base",
        sites=(top_side,),
        parts=_shell(colours["shell"]),
        bodies=tuple(_drawer(name, height, colours) for name, height in _DRAWERS),
    )
    return Asset(path, _PLACEMENT, Body("object", bodies=(base,)))


def _shell(colour: str) -> tuple[Part, ...]:
    middle_y = 0.0165
    boxes = [
        ((0.1265, 0.0950, 0.0030), (_CENTRE_X, middle_y, 0.2200)),
        ((0.1265, 0.0950, 0.0030), (_CENTRE_X, middle_y, 0.0076)),
        ((0.0030, 0.0950, 0.1060), (_CENTRE_X - 0.1235, middle_y, 0.1138)),
        ((0.0030, 0.0950, 0.1060), (_CENTRE_X + 0.1235, middle_y, 0.1138)),
        ((0.1265, 0.0030, 0.1060), (_CENTRE_X, 0.1087, 0.1138)),
        ((0.1205, 0.0900, 0.0010), (_CENTRE_X, middle_y, 0.1505)),
        ((0.1205, 0.0900, 0.0010), (_CENTRE_X, middle_y, 0.0815)),
    ]
    return tuple(Part(box=size, at=at, colour=colour) for size, at in boxes)


def _drawer(name: str, height: float, colours: Mapping[str, str]) -> Body:
    """A drawer whose region is centred at `height`; it slides towards -y."""
    inside, front, bar = colours["inside"], colours["front"], colours["handle"]
    boxes = [
        ((0.1100, 0.0790, 0.0015), (_CENTRE_X, 0.0120, height - 0.0310), inside),
        ((0.0020, 0.0790, 0.0200), (_CENTRE_X - 0.1090, 0.0120, height - 0.0125), inside),
        ((0.0020, 0.0790, 0.0200), (_CENTRE_X + 0.1090, 0.0120, height - 0.0125), inside),
        ((0.1100, 0.0020, 0.0200), (_CENTRE_X, 0.0900, height - 0.0125), inside),
        ((0.1160, 0.0040, 0.0300), (_CENTRE_X, -0.0720, height - 0.0010), front),
        ((0.0450, 0.0045, 0.0050), (_CENTRE_X, -0.1048, height), bar),
        ((0.0045, 0.0140, 0.0050), (_CENTRE_X - 0.0410, -0.0900, height), bar),
        ((0.0045, 0.0140, 0.0050), (_CENTRE_X + 0.0410, -0.0900, height), bar),
    ]
    region = Site(
        f"{name}_region", (0.00328, 0.01128, height), _STANDING, (0.02993, 0.07561, 0.10224)
    )
    return Body(
        f"cabinet_{name}",
        joint=Joint(f"{name}_level", "slide", "0 1 0", "-0.16 0.01", "50"),
        inertial=3.0,
        sites=(region,),
        parts=tuple(Part(box=size, at=at, colour=colour) for size, at, colour in boxes),
    )
