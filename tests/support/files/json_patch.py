"""As much of RFC 6902 as the overlays of the manifests use: `add`."""

import copy
from typing import Any

import yaml


def patched(document: dict[str, Any], patch: str) -> dict[str, Any]:
    """Return a document with every operation of a patch applied.

    Args:
        document: What is patched; it stays as it is.
        patch: A list of operations, as YAML.

    Raises:
        KeyError: A path leads nowhere.
    """
    changed = copy.deepcopy(document)
    for operation in yaml.safe_load(patch):
        assert operation["op"] == "add"
        *folders, name = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")
        )
        place: Any = changed
        for folder in folders:
            place = place[int(folder) if isinstance(place, list) else folder]
        if isinstance(place, list):
            place.insert(len(place) if name == "-" else int(name), operation["value"])
        else:
            place[name] = operation["value"]
    return changed
