"""Primitive shapes of the stand-ins and how they become MuJoCo geoms.

A round shape collides as boxes, because a box touches with several points, so that things stand
still and do not spin between the fingers; it is drawn as a cylinder, a ring as one mesh.
"""

import math
from dataclasses import dataclass

Numbers = tuple[float, ...]

RING_PANELS = 12
RING_SEGMENTS = 24  # of the mesh that is drawn
_AXES = {"x": (1.0, 0.0, 0.0), "y": (0.0, 1.0, 0.0), "z": (0.0, 0.0, 1.0)}


@dataclass(frozen=True)
class Mesh:
    """Triangles over points, seen from outside counter-clockwise."""

    points: tuple[Numbers, ...]
    triangles: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Geom:
    """One MuJoCo geom; sizes are half sizes, quaternions w x y z. A mesh has no size."""

    kind: str
    size: Numbers
    position: Numbers
    quaternion: Numbers
    colour: str
    collides: bool
    drawn: bool
    mass: float | None = None
    mesh: Mesh | None = None

    @property
    def volume(self) -> float:
        """For sharing out an object's mass over its boxes."""
        return 8.0 * math.prod(self.size)


@dataclass(frozen=True)
class Part:
    """A shape of the table; exactly one of `box`, `prism` and `ring` is given.

    `prism` is a radius, `ring` the radii at both ends of `span`; both stand along `axis`.
    `only` limits a part to what cameras see ("seen") or to what collides ("hit").
    """

    box: Numbers | None = None
    prism: float | None = None
    ring: Numbers | None = None
    span: Numbers = (0.0, 0.0)
    axis: str = "z"
    wall: float = 0.0
    at: Numbers = (0.0, 0.0, 0.0)
    tilt: tuple[str, float] | None = None
    colour: str = "#808080"
    only: str = ""
    mass: float | None = None
    density: float | None = None

    def __post_init__(self) -> None:
        if sum(shape is not None for shape in (self.box, self.prism, self.ring)) != 1:
            raise ValueError(f"a part is a box, a prism or a ring, got {self}")
        if self.only not in ("", "seen", "hit") or self.axis not in _AXES:
            raise ValueError(f"only is 'seen', 'hit' or empty and axis x, y or z, got {self}")

    def geoms(self) -> list[Geom]:
        """What MuJoCo is to simulate and to draw."""
        hit, seen = self.only != "seen", self.only != "hit"
        if self.box is not None:
            turn = _about(*self.tilt) if self.tilt else (1.0, 0.0, 0.0, 0.0)
            return [self._box(self.box, self.at, turn, (hit, seen))]
        if self.prism is not None:
            return self._prism(self.prism, hit, seen)
        return self._ring(hit, seen)

    def _box(self, size: Numbers, at: Numbers, turn: Numbers, flags: tuple[bool, bool]) -> Geom:
        return Geom("box", size, at, turn, self.colour, *flags, mass=self.mass)

    def _prism(self, radius: float, hit: bool, seen: bool) -> list[Geom]:
        """An octagon of four crossed boxes, drawn as the cylinder inside it.

        Two of the boxes are a little shorter: it stands on a cross, which is as steady as the
        octagon and costs half the contacts.
        """
        half = (self.span[1] - self.span[0]) / 2
        middle = _along(self.axis, (self.span[0] + self.span[1]) / 2)
        at = tuple(a + b for a, b in zip(self.at, middle, strict=True))
        upright = {"z": (1.0, 0.0, 0.0, 0.0), "y": _about("x", -math.pi / 2)}[self.axis]
        geoms = []
        if hit:
            side = radius * math.tan(math.pi / 8)
            for quarter in range(4):
                turn = _times(upright, _about("z", quarter * math.pi / 4))
                tall = half - quarter % 2 * min(0.0005, half / 4)
                geoms.append(self._box((radius, side, tall), at, turn, (True, False)))
        if seen:
            geoms.append(Geom("cylinder", (radius, half), at, upright, self.colour, False, True))
        return geoms

    def _ring(self, hit: bool, seen: bool) -> list[Geom]:
        """Panels around the z axis that lean outwards where the upper radius is larger."""
        low, high = self.ring or (0.0, 0.0)
        rise, run = self.span[1] - self.span[0], high - low
        lean, reach = math.atan2(run, rise), math.hypot(rise, run) / 2
        width = max(low, high) * math.tan(math.pi / RING_PANELS)
        radius, height = (low + high) / 2, (self.span[0] + self.span[1]) / 2
        geoms = []
        for panel in range(RING_PANELS):
            angle = 2 * math.pi * panel / RING_PANELS
            at = (radius * math.cos(angle), radius * math.sin(angle), height)
            turn = _times(_about("z", angle), _about("y", lean))
            if hit:
                geoms.append(self._box((self.wall, width, reach), at, turn, (True, False)))
        if seen:
            mesh = _ring_mesh((low, high), self.span, self.wall)
            still = ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0))
            geoms.append(Geom("mesh", (), *still, self.colour, False, True, mesh=mesh))
        return geoms


def _ring_mesh(radii: Numbers, span: Numbers, wall: float) -> Mesh:
    """A wall around the z axis, closed all round so that it has an inside."""
    (low, high), (bottom, top) = radii, span
    profile = ((low - wall, bottom), (low + wall, bottom), (high + wall, top), (high - wall, top))
    points, triangles = [], []
    for segment in range(RING_SEGMENTS):
        angle = 2 * math.pi * segment / RING_SEGMENTS
        points += [(r * math.cos(angle), r * math.sin(angle), z) for r, z in profile]
        here, there = 4 * segment, 4 * ((segment + 1) % RING_SEGMENTS)
        for side in range(4):
            other = (side + 1) % 4
            triangles.append((here + side, there + side, there + other))
            triangles.append((here + side, there + other, here + other))
    return Mesh(tuple(points), tuple(triangles))


def _along(axis: str, distance: float) -> Numbers:
    return tuple(distance * one for one in _AXES[axis])


def _about(axis: str, angle: float) -> Numbers:
    sine = math.sin(angle / 2)
    return (math.cos(angle / 2), *(sine * one for one in _AXES[axis]))


def _times(a: Numbers, b: Numbers) -> Numbers:
    """Quaternion product: first turn by `b`, then by `a`."""
    w, x, y, z = a
    p, q, r, s = b
    return (
        w * p - x * q - y * r - z * s,
        w * q + x * p + y * s - z * r,
        w * r - x * s + y * p + z * q,
        w * s + x * r - y * q + z * p,
    )
