"""Print pip constraints with the oldest version of each dependency that pyproject.toml allows.

    python tools/oldest_versions.py > oldest.txt
    pip install -e '.[dev,data]' -c oldest.txt

CI runs the tests with them. It needs only the standard library, because nothing is installed yet.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
# A name, extras, and the lower bound: "fsspec[http]>=2024.2".
LOWER_BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*>=\s*(?P<version>[0-9.]+)")


def requirements(project: dict) -> Iterator[str]:
    """All requirements of a project, with those of its extras."""
    yield from project["dependencies"]
    for extra in project["optional-dependencies"].values():
        yield from extra


def oldest(lines: Iterable[str], platform: str) -> dict[str, str]:
    """Name -> oldest version, for the requirements that hold on a platform."""
    versions = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = LOWER_BOUND.match(requirement.strip())
        if match is not None and holds(marker, platform):
            versions[match["name"]] = match["version"]
    return versions


def holds(marker: str, platform: str) -> bool:
    """Whether a marker such as `sys_platform == 'linux'` holds; other markers hold."""
    compared = re.match(r"\s*sys_platform\s*(==|!=)\s*'([a-z0-9]+)'", marker)
    if compared is None:
        return True
    equal = compared[2] == platform
    return equal if compared[1] == "==" else not equal


def main() -> None:
    """Print the constraints of this platform."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for name, version in sorted(oldest(requirements(project), sys.platform).items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
