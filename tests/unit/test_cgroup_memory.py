"""The memory limit of a control group, read from files as Linux has them."""

from pathlib import Path

import pytest

from trocar_server.cgroup_memory import cgroup_limit, limit_files

GIB = 1 << 30


def limit_of(folder: Path, own: str, limits: dict[str, str]) -> int | None:
    """Write the files of a machine; read the limit of a process of the group `own`."""
    root = folder / "cgroup"
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (folder / "self").write_text(own)
    return cgroup_limit(limit_files(folder / "self", root))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"system.slice/trocar.service/memory.max": f"{GIB}\n"}, GIB),  # MemoryMax= of its unit
        ({"system.slice/memory.max": f"{GIB}\n", "system.slice/trocar.service/memory.max": "max\n"}, GIB),
        ({"system.slice/memory.max": "3\n", "system.slice/trocar.service/memory.max": "2\n"}, 2),
        ({"memory.max": "1\n", "system.slice/memory.max": "3\n"}, 1),  # a container's, seen from within
        ({"system.slice/other.service/memory.max": "5\n", "system.slice/memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "7\n"}, 7),  # version 1
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),  # its word for no limit
        ({"memory.max": "nonsense", "system.slice/memory.max": ""}, None),
    ],
)
def test_the_smallest_limit_of_the_own_group_and_its_parents_counts(
    tmp_path: Path, limits: dict[str, str], expected: int | None
) -> None:
    assert limit_of(tmp_path, "0::/system.slice/trocar.service\n", limits) == expected


@pytest.mark.parametrize("own", ["", "4:memory:/a\n1:name=systemd:/b\n", "0::/\n", "0::/../../b\n", "\n\0"])
def test_without_a_group_of_its_own_the_root_counts(tmp_path: Path, own: str) -> None:
    assert limit_of(tmp_path, own, {"memory.max": f"{GIB}\n", "b/memory.max": "1\n"}) == GIB


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(limit_files(tmp_path / "self", tmp_path / "none")) is None
