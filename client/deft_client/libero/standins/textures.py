"""Small floor and wall pictures, drawn from arithmetic so that they are the same everywhere."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
