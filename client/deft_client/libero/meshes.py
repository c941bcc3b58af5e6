"""Thins triangle meshes for drawing: at 256 pixels a camera cannot see most of a robot's detail.

The robot's own pictures have 135,000 triangles, which a software renderer spends four fifths of
a frame on. Vertices that share a cell of a grid are joined; a face that loses a corner is dropped.
"""

import numpy as np
from numpy.typing import NDArray

CELL_METRES = 0.01
_CELL_SHARE = 0.02  # of the largest side, for large things


Indices = NDArray[np.int32]


def thinned_faces(
    vertices: NDArray[np.float32], faces: Indices, cell: float = CELL_METRES
) -> tuple[Indices, Indices]:
    """The faces [face, 3] that remain, over the same vertices, and which rows they come from."""
    cell = max(cell, _CELL_SHARE * float(np.ptp(vertices, axis=0).max()))
    cells = np.floor(vertices / cell).astype(np.int64)
    _, cluster, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    cluster = cluster.reshape(-1)
    total = np.stack([np.bincount(cluster, axis) for axis in vertices.T], axis=1)
    centre = total / counts[:, None]
    distance = np.linalg.norm(vertices - centre[cluster], axis=1)
    order = np.lexsort((distance, cluster))
    nearest = order[np.searchsorted(cluster[order], np.arange(len(counts)))]
    joined = nearest[cluster][faces]
    corners = np.sort(joined, axis=1)
    whole = (corners[:, 0] != corners[:, 1]) & (corners[:, 1] != corners[:, 2])
    rows = np.flatnonzero(whole)
    _, first = np.unique(corners[rows], axis=0, return_index=True)
    rows = rows[np.sort(first)]
    return joined[rows].astype(np.int32), rows.astype(np.int32)
