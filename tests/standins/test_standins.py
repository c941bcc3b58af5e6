"""The stand-ins as files: what LIBERO looks for is there."""

import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from deft_libero.errors import AssetsError
from deft_libero.simulator.assets import STAND_IN_MARKER, describe_assets
from tests.standins import stand_ins
from tests.standins.build import MARKER, TABLE, build, generate
from tests.standins.model import read_asset
from tests.standins.shapes import Part

GENERATED = generate()
ENTRIES = json.loads(TABLE.read_text())
OBJECTS = sorted(path for path in GENERATED if path.endswith(".xml") and "scenes/" not in path)


def test_every_generation_gives_the_same_bytes():
    assert generate() == GENERATED


def test_all_files_that_the_suites_open_are_there():
    assert len(OBJECTS) == 28
    scenes = {path for path in GENERATED if path.startswith("scenes/")}
    styles = ("floor", "tabletop", "kitchen_tabletop", "living_room_tabletop", "study")
    assert scenes == {f"scenes/libero_{style}_base_style.xml" for style in styles}


@pytest.mark.parametrize("path", OBJECTS)
def test_an_object_file_has_what_libero_reads(path):
    outer = ET.fromstring(GENERATED[path]).find("./worldbody/body")
    assert outer is not None
    assert outer.find("./body[@name='object']") is not None
    marks = {site.get("name") for site in outer.findall("./site")}
    assert marks == {"bottom_site", "top_site", "horizontal_radius_site"}
    for geom in outer.iter("geom"):
        drawn_only = geom.get("contype") == "0" and geom.get("conaffinity") == "0"
        assert geom.get("group") == ("1" if drawn_only else "0")


@pytest.mark.parametrize("path", OBJECTS)
def test_no_region_is_behind_a_body_without_one(path):
    """LIBERO's search for regions stops at the first nested body that has no site below it."""
    outer = ET.fromstring(GENERATED[path]).find("./worldbody/body")
    has_site = [next(body.iter("site"), None) is not None for body in outer.iter("body")][1:]
    reached = has_site.index(False) if False in has_site else len(has_site)
    assert not any(has_site[reached:])


@pytest.mark.parametrize("path", sorted(ENTRIES["objects"]))
def test_collision_shapes_weigh_what_the_original_weighs(path):
    asset = read_asset(path, ENTRIES["objects"][path])
    root = ET.fromstring(GENERATED[f"{path}/{path.split('/')[1]}.xml"])
    masses = [float(geom.get("mass")) for geom in root.iter("geom") if geom.get("group") == "0"]
    assert math.isclose(sum(masses), asset.mass, rel_tol=0.02)


def test_a_round_thing_collides_as_boxes_and_is_drawn_as_a_cylinder():
    geoms = Part(prism=0.03, span=(0.0, 0.1)).geoms()
    assert [geom.kind for geom in geoms] == ["box"] * 4 + ["cylinder"]
    assert not any(geom.collides and geom.drawn for geom in geoms)


def test_a_ring_leans_outwards_when_it_is_wider_above():
    panels = Part(ring=(0.02, 0.04), span=(0.0, 0.02), wall=0.001, only="hit").geoms()
    assert len(panels) == 12
    w, x, y, z = panels[0].quaternion  # the panel at angle 0: turned about y alone
    assert math.isclose(2 * math.asin(y), math.pi / 4, rel_tol=1e-6)
    assert math.isclose(np.hypot(w, y), 1.0, rel_tol=1e-9)
    assert (x, z) == (0.0, 0.0)


def test_the_mesh_of_a_ring_is_closed_and_right_side_out():
    (ring,) = Part(ring=(0.02, 0.04), span=(0.0, 0.02), wall=0.001, only="seen").geoms()
    mesh = ring.mesh
    edges = [(a, b) for one in mesh.triangles for a, b in zip(one, (*one[1:], one[0]), strict=True)]
    assert len(set(edges)) == len(edges)
    assert {(b, a) for a, b in edges} == set(edges), "every edge has a face on both sides"
    corners = np.array(mesh.points)[np.array(mesh.triangles)]
    volume = np.einsum("ij,ij->", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])) / 6
    assert math.isclose(volume, 2 * math.pi * 0.03 * 0.02 * 0.002, rel_tol=0.05)


def test_a_part_must_be_exactly_one_shape():
    with pytest.raises(ValueError, match="prism"):
        Part(box=(1, 1, 1), prism=1.0)


def test_unknown_words_in_the_table_are_refused():
    with pytest.raises(ValueError, match=r"no \['color'\]"):
        read_asset("x/y", {"placement": [0, 0, 0], "parts": [{"box": [1, 1, 1], "color": "red"}]})


def test_the_label_says_stand_in_and_which_version():
    assets = describe_assets(stand_ins())
    assert not assets.is_real
    assert assets.label == f"stand-in {GENERATED[MARKER].decode().strip()}"
    assert MARKER == STAND_IN_MARKER


def test_a_folder_that_is_not_assets_is_refused_with_what_it_lacks(tmp_path):
    with pytest.raises(AssetsError, match="no readable scenes/"):
        describe_assets(tmp_path)
    build(tmp_path)
    (tmp_path / MARKER).unlink()
    assert describe_assets(tmp_path).is_real
