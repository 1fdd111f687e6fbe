"""Scenes without meshes and textures, from LIBERO's own: what is seen is what collides.

    python infra/assets/simplify_libero.py ASSETS FOLDER

Physics are the same to the last bit: inertia comes from the collision geometry, which stays as it is.
"""

from __future__ import annotations

import colorsys
import copy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

FROM_ROBOSUITE = ("texplane", "tex-wall")
"""Names of textures that are kept: LIBERO loads their files from the package robosuite."""

_WOOD = "0.8 0.75 0.65 1"
_HUE_STEP = 0.618034
_SEEN = {"group": "1", "contype": "0", "conaffinity": "0"}


def simplify(root: ET.Element, color: str) -> None:
    """Remove all meshes, and the textures that are read from files, from a MuJoCo XML tree, in place.

    A body that had a mesh is drawn as its collision geometry. `color` ("r g b a") is the color of materials that
    are left without a texture and a color.
    """
    for asset in root.iter("asset"):
        for element in list(asset):
            filed = element.get("file") is not None and element.get("name") not in FROM_ROBOSUITE
            if element.tag == "mesh" or (element.tag == "texture" and filed):
                asset.remove(element)
        left = {element.get("name") for element in asset.iter("texture")}
        for material in asset.iter("material"):
            if material.get("texture") not in left:
                material.attrib = {"name": material.attrib["name"], "rgba": material.get("rgba", color)}
    for body in list(root.iter("body")):
        _draw_collisions(body)


def _draw_collisions(body: ET.Element) -> None:
    """Replace the meshes of a body by visible copies of its collision geometry, or by a small box if it has none."""
    meshes = [geom for geom in body.findall("geom") if geom.get("mesh")]
    if not meshes:
        return
    solid = [geom for geom in body.findall("geom") if geom.get("contype") != "0" and not geom.get("mesh")]
    drawn = [copy.deepcopy(geom) for geom in solid] or [ET.Element("geom", {"type": "box", "size": "0.01 0.01 0.01"})]
    for number, geom in enumerate(drawn):
        geom.attrib.pop("rgba", None)
        geom.attrib.pop("name", None)
        look = {key: meshes[0].attrib[key] for key in ("material", "rgba", "name") if key in meshes[0].attrib}
        if number:
            look.pop("name", None)
        geom.attrib.update(_SEEN | look)
    place = list(body).index(meshes[0])
    for mesh in meshes:
        body.remove(mesh)
    for geom in reversed(drawn):
        body.insert(place, geom)


def simplify_folder(assets: Path, folder: Path) -> None:
    """Write a simplified copy of each XML file in `assets` to the same relative path in `folder`.

    Each object gets a color of its own.
    """
    for number, path in enumerate(sorted(assets.rglob("*.xml"))):
        red, green, blue = colorsys.hsv_to_rgb(number * _HUE_STEP % 1.0, 0.75, 0.75 if number % 2 else 0.45)
        tree = ET.parse(path)
        scene = path.parent.name == "scenes"
        simplify(tree.getroot(), _WOOD if scene else f"{red:.2f} {green:.2f} {blue:.2f} 1")
        target = folder / path.relative_to(assets)
        target.parent.mkdir(parents=True, exist_ok=True)
        tree.write(target)


if __name__ == "__main__":
    simplify_folder(Path(sys.argv[1]), Path(sys.argv[2]))
