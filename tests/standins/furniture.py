"""The five rooms: floor, walls, lights, cameras and the piece of furniture things stand on.

Names and collision shapes are what LIBERO's arena classes look for; they also replace the file
names of the two textures, so both must name a file.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from tests.standins.model import Asset, Body, Joint, Site, rgba, to_bytes
from tests.standins.shapes import Part

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


WOOD, DARK_WOOD, DESK, STEEL = "#c6b4a2", "#5f4335", "#ab8d6a", "#8a8d92"

_WALLS = (
    ("leftcorner", "-1.25 2.25 1.5", "0.65328 0.65328 0.2706 0.2706", "1.06 1.5 0.01"),
    (
        "rightcorner",
        "-1.25 -2.25 1.5",
        "0.65328 0.65328 -0.2706 -0.2706",
        "1.06 1.5 0.01",
    ),
    ("left", "1.25 3 1.5", "0.7071068 0.7071068 0 0", "1.75 1.5 0.01"),
    ("right", "1.25 -3 1.5", "0.7071068 -0.7071068 0 0", "1.75 1.5 0.01"),
    ("rear", "-2 0 1.5", "0.5 0.5 0.5 0.5", "1.5 1.5 0.01"),
    ("front", "3 0 1.5", "0.5 0.5 -0.5 -0.5", "3 1.5 0.01"),
)
_CAMERAS = (
    ("frontview", "1.0 0 1.45", "0.56 0.43 0.43 0.56"),
    ("birdview", "-0.2 0 3.0", "0.7071 0 0 0.7071"),
    ("agentview", "0.5 0 1.35", "0.653 0.271 0.271 0.653"),
    ("sideview", "-0.0565 1.2761 1.488", "0.0099 0.0069 0.5912 0.8064"),
)
_FIRM = {"friction": "0.95 0.3 0.1", "solref": "0.001 1", "solimp": "0.998 0.998 0.001"}
_DRAWN_ONLY = {"group": "1", "contype": "0", "conaffinity": "0"}


def build_arenas() -> dict[str, bytes]:
    """Scene files by their path below the assets folder."""
    rooms = {
        "floor": _room(floor_in_body=True),
        "tabletop": _room(_table()),
        "kitchen_tabletop": _room(_table()),
        "living_room_tabletop": _room(_living_room_table(), floor_in_body=True),
        "study": _room(_desk()),
    }
    return {f"scenes/libero_{name}_base_style.xml": to_bytes(room) for name, room in rooms.items()}


def _room(furniture: ET.Element | None = None, floor_in_body: bool = False) -> ET.Element:
    root = ET.Element("mujoco", model="stand_in_arena")
    asset = ET.SubElement(root, "asset")
    for name, repeat in (("texplane", "2 2"), ("tex-wall", "3 3")):
        ET.SubElement(asset, "texture", type="2d", name=name, file=f"../textures/{name}.png")
        ET.SubElement(
            asset, "material", name=f"{name}_material", texture=name, texrepeat=repeat,
            texuniform="true", specular="0", shininess="0", reflectance="0",
        )  # fmt: skip
    world = ET.SubElement(root, "worldbody")
    floor_parent = ET.SubElement(world, "body", name="floor") if floor_in_body else world
    ET.SubElement(
        floor_parent, "geom", name="floor", type="plane", size="3 3 .125", pos="0 0 0",
        material="texplane_material", group="1", condim="3",
    )  # fmt: skip
    for name, pos, quat, size in _WALLS:
        shape = {"name": f"wall_{name}_visual", "type": "box", "pos": pos, "quat": quat}
        ET.SubElement(
            world, "geom", {**shape, "size": size, "material": "tex-wall_material", **_DRAWN_ONLY}
        )
    if furniture is not None:
        world.append(furniture)
    for name, pos in (("light1", "1 1 4"), ("light2", "-3 -3 4")):
        ET.SubElement(
            world, "light", name=name, pos=pos, dir="0 -.15 -1", diffuse=".8 .8 .8",
            specular="0.3 0.3 0.3", castshadow="false",
        )  # fmt: skip
    for name, pos, quat in _CAMERAS:
        ET.SubElement(world, "camera", name=name, mode="fixed", pos=pos, quat=quat)
    return root


def _table() -> ET.Element:
    """LIBERO sets size and place of everything in it by name."""
    table = ET.Element("body", name="table", pos="0 0 0.875")
    size = {"type": "box", "pos": "0 0 0", "size": "0.5 0.6 0.025"}
    ET.SubElement(table, "geom", {**size, "name": "table_collision", "group": "0"})
    ET.SubElement(
        table, "geom", {**size, "name": "table_visual", "rgba": rgba(WOOD), **_DRAWN_ONLY}
    )
    ET.SubElement(table, "site", name="table_top", pos="0 0 0.025", size="0.001", rgba="0 0 0 0")
    for leg in range(1, 5):
        shape = {"name": f"table_leg{leg}_visual", "type": "cylinder", "size": "0.025 0.4"}
        ET.SubElement(table, "geom", {**shape, "rgba": rgba(STEEL), **_DRAWN_ONLY})
    return table


def _living_room_table() -> ET.Element:
    """A low coffee table; its top is at 0.4367."""
    table = ET.Element("body", name="living_room_table")
    inner = ET.SubElement(table, "body", name="living_room_table_col")
    for pos, size in (
        ("-0.25 0.0524 0.4249", "0.6717 0.9000 0.0118"),
        ("-0.25 0.0524 0.2041", "0.4352 0.4116 0.2088"),
    ):
        shape = {"type": "box", "pos": pos, "size": size}
        ET.SubElement(inner, "geom", {**shape, "group": "0", **_FIRM})
        ET.SubElement(inner, "geom", {**shape, "rgba": rgba(DARK_WOOD), **_DRAWN_ONLY})
    return table


def _desk() -> ET.Element:
    """A desk; its top is at 0.8851."""
    desk = ET.Element("body", name="study_table")
    top = {"type": "box", "pos": "0 0 0.8493", "size": "0.6895 1.3927 0.0358"}
    ET.SubElement(desk, "geom", {**top, "group": "0", **_FIRM})
    ET.SubElement(desk, "geom", {**top, "rgba": rgba(DESK), **_DRAWN_ONLY})
    for x in (-0.5, 0.5):
        for y in (-0.69, 0.71):
            leg = {"type": "box", "pos": f"{x} {y} 0.4", "size": "0.02 0.05 0.4"}
            ET.SubElement(desk, "geom", {**leg, "rgba": rgba(STEEL), **_DRAWN_ONLY})
    return desk
