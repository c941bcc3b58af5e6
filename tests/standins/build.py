"""Writes the stand-ins: one table in, a folder of MJCF and PNG files out."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.standins.furniture import build_arenas, build_cabinet
from tests.standins.model import Asset, asset_xml, read_asset

_SIZE = 64


def draw_textures() -> dict[str, NDArray[np.uint8]]:
    """Pictures by their path below the assets folder; names are LIBERO's."""
    pictures = {
        "light-gray-floor-tile": _tiles((205, 202, 198), (178, 175, 170)),
        "gray_ceramic_tile": _tiles((168, 168, 166), (140, 140, 138)),
        "seamless_wood_planks_floor": _planks((222, 192, 140), (196, 164, 112)),
        "light-gray-plaster": _tiles((223, 219, 212), (223, 219, 212)),
        "yellow_linen_wall_texture": _tiles((226, 214, 178), (222, 209, 171)),
        "texplane": _tiles((205, 202, 198), (178, 175, 170)),
        "tex-wall": _tiles((223, 219, 212), (223, 219, 212)),
    }
    return {f"textures/{name}.png": picture for name, picture in pictures.items()}


def _tiles(face: tuple[int, int, int], joint: tuple[int, int, int]) -> NDArray[np.uint8]:
    picture = np.empty((_SIZE, _SIZE, 3), dtype=np.uint8)
    picture[:] = face
    picture[:1] = picture[:, :1] = joint
    return picture


def _planks(face: tuple[int, int, int], joint: tuple[int, int, int]) -> NDArray[np.uint8]:
    picture = _tiles(face, face)
    picture[:: _SIZE // 4] = joint
    return picture


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """A PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


MARKER = "deft_stand_ins.txt"
TABLE = Path(__file__).parent / "table.json"


def generate() -> dict[str, bytes]:
    """Every file by its path; the marker holds a version that changes with what they say."""
    table = json.loads(TABLE.read_text())
    assets = [read_asset(path, entry) for path, entry in table["objects"].items()]
    assets += [read_asset(path, entry) for path, entry in table["fixtures"].items()]
    assets += [build_cabinet(path, colours) for path, colours in table["cabinets"].items()]
    contacts = table["contact"]
    written = {_file_of(asset): asset_xml(asset, contacts[asset.contact]) for asset in assets}
    written |= build_arenas()
    pictures = draw_textures()
    # The bytes of a PNG file depend on the zlib at hand, so the version counts pixels.
    pixels = {path: picture.tobytes() for path, picture in pictures.items()}
    digest = hashlib.sha256()
    for path, content in sorted({**written, **pixels}.items()):
        digest.update(path.encode() + b"\0" + content)
    written |= {path: encode_png(picture) for path, picture in pictures.items()}
    written[MARKER] = digest.hexdigest()[:8].encode() + b"\n"
    return written


def build(folder: Path) -> None:
    """Write the stand-ins into a folder, which is made if missing."""
    for path, content in generate().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _file_of(asset: Asset) -> str:
    folder, name = asset.path.rsplit("/", 1)
    single = folder == "articulated_objects"
    return f"{asset.path}.xml" if single else f"{asset.path}/{name}.xml"
