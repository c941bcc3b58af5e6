"""The table of stand-ins as typed bodies, and bodies as MJCF. Knows no particular object."""

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tests.standins.shapes import Geom, Mesh, Numbers, Part

RING_NAME = "stand_in_ring"  # begins the names of meshes


@dataclass(frozen=True)
class Site:
    """A region that goals speak of, or a mark that is drawn."""

    name: str
    at: Numbers = (0.0, 0.0, 0.0)
    quat: Numbers = (1.0, 0.0, 0.0, 0.0)
    box: Numbers | None = None
    disk: Numbers | None = None
    rgba: Numbers = (0.8, 0.8, 0.8, 0.0)


@dataclass(frozen=True)
class Joint:
    """A drawer, door or knob; text as MuJoCo wants it."""

    name: str
    type: str
    axis: str
    range: str
    damping: str


@dataclass(frozen=True)
class Body:
    """A rigid piece with its children. `inertial` is a mass in kg with unit inertia."""

    name: str
    at: Numbers = (0.0, 0.0, 0.0)
    quat: Numbers = (1.0, 0.0, 0.0, 0.0)
    joint: Joint | None = None
    inertial: float | None = None
    sites: tuple[Site, ...] = ()
    parts: tuple[Part, ...] = ()
    bodies: tuple["Body", ...] = ()


@dataclass(frozen=True)
class Asset:
    """One file: `placement` is bottom, top and radius, which steer LIBERO's reset sampler."""

    path: str
    placement: Numbers
    body: Body
    mass: float | None = None
    contact: str = "firm"


def read_asset(path: str, entry: Mapping[str, Any]) -> Asset:
    """An entry of the table; unknown keys are refused by the dataclasses."""
    rest = dict(entry)
    placement, mass = tuple(rest.pop("placement")), rest.pop("mass", None)
    contact = rest.pop("contact", "firm")
    return Asset(path, placement, read_body({"name": "object", **rest}), mass, contact)


def read_body(entry: Mapping[str, Any]) -> Body:
    """A body of the table with everything below it."""
    rest = {name: _tupled(value) for name, value in entry.items()}
    rest["parts"] = tuple(_read(Part, part) for part in entry.get("parts", ()))
    rest["sites"] = tuple(_read(Site, site) for site in entry.get("sites", ()))
    rest["bodies"] = tuple(read_body(body) for body in entry.get("bodies", ()))
    if "joint" in entry:
        rest["joint"] = _read(Joint, entry["joint"])
    body: Body = _read(Body, rest)
    return body


def _read(kind: Any, entry: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    if not known.issuperset(entry):
        raise ValueError(f"{kind.__name__} has no {sorted(set(entry) - known)}; known: {known}")
    return kind(**{name: _tupled(value) for name, value in entry.items()})


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def asset_xml(asset: Asset, contact: Mapping[str, str]) -> bytes:
    """The file LIBERO opens: the body named `object` inside a body that carries three marks."""
    root = ET.Element("mujoco", model=asset.path.rsplit("/", 1)[-1])
    meshes = ET.Element("asset")
    outer = ET.Element("body")
    outer.append(_Writer(contact, meshes).body(asset.body, asset.mass))
    if len(meshes):
        root.append(meshes)
    ET.SubElement(root, "worldbody").append(outer)
    bottom, top, radius = asset.placement
    marks = {
        "bottom_site": (0.0, 0.0, bottom),
        "top_site": (0.0, 0.0, top),
        "horizontal_radius_site": (radius, radius, 0.0),
    }
    for name, at in marks.items():
        ET.SubElement(outer, "site", name=name, pos=text(at), size="0.005", rgba="0 0 0 0")
    return to_bytes(root)


@dataclass(frozen=True)
class _Writer:
    """Writes bodies with one kind of contact; collects the meshes they are drawn with."""

    contact: Mapping[str, str]
    meshes: ET.Element

    def body(self, body: Body, mass: float | None = None) -> ET.Element:
        """A body with its children; `mass` is shared out over the boxes by their volume."""
        element = ET.Element("body", name=body.name, pos=text(body.at), quat=text(body.quat))
        if body.inertial is not None:
            ET.SubElement(
                element, "inertial", pos="0 0 0", mass=text([body.inertial]), diaginertia="1 1 1"
            )
        if body.joint is not None:
            joint = {field.name: str(getattr(body.joint, field.name)) for field in fields(Joint)}
            ET.SubElement(element, "joint", joint, limited="true", pos="0 0 0")
        for site in body.sites:
            element.append(_site_element(site))
        geoms = [geom for part in body.parts for geom in part.geoms()]
        volume = sum(geom.volume for geom in geoms if geom.collides)
        for geom in geoms:
            share = geom.mass if mass is None else mass * geom.volume / volume
            self._add_geom(element, geom, share)
        for child in body.bodies:
            element.append(self.body(child))
        return element

    def _add_geom(self, parent: ET.Element, geom: Geom, mass: float | None) -> None:
        """Group 0 collides and is never drawn, group 1 is drawn and never collides."""
        shape = {"type": geom.kind, "pos": text(geom.position), "quat": text(geom.quaternion)}
        if geom.mesh is None:
            shape["size"] = text(geom.size)
        else:
            shape["mesh"] = self._mesh_name(geom.mesh)
        if geom.collides:
            weight = {} if mass is None else {"mass": text([mass])}
            ET.SubElement(parent, "geom", {**shape, "group": "0", **self.contact, **weight})
        if geom.drawn:
            hidden = {"group": "1", "contype": "0", "conaffinity": "0", "mass": "0"}
            ET.SubElement(parent, "geom", {**shape, **hidden, "rgba": rgba(geom.colour)})

    def _mesh_name(self, mesh: Mesh) -> str:
        name = f"{RING_NAME}{len(self.meshes)}"
        points = text([number for point in mesh.points for number in point])
        corners = " ".join(str(corner) for triangle in mesh.triangles for corner in triangle)
        ET.SubElement(self.meshes, "mesh", name=name, vertex=points, face=corners)
        return name


def _site_element(site: Site) -> ET.Element:
    size = site.box or site.disk
    if size is None:
        raise ValueError(f"site {site.name} needs a box or a disk")
    return ET.Element(
        "site",
        name=site.name,
        type="box" if site.box else "cylinder",
        pos=text(site.at),
        quat=text(site.quat),
        size=text(size),
        rgba=text(site.rgba),
        group="0",
    )


def rgba(colour: str) -> str:
    """`#rrggbb` as MuJoCo's four numbers."""
    return text([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)] + [1.0])


def text(numbers: Iterable[float]) -> str:
    """Numbers as MJCF writes them, rounded so that the files are the same on every machine."""
    return " ".join(f"{round(number, 6) + 0.0:.9g}" for number in numbers)


def to_bytes(root: ET.Element) -> bytes:
    """An indented document."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode").encode() + b"\n"
