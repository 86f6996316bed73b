"""The requirements of an extra, one a line: an image installs them before the code, in a layer that
a change of the code leaves alone.

    python deploy/tools/requirements.py pyproject.toml EXTRA[,EXTRA] > requirements.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Requirements of the project and of some of its extras, those that these name included.

    Raises KeyError for an extra that there is not.
    """
    project = tomllib.loads(pyproject)["project"]
    own = re.compile(rf"{re.escape(project['name'])}\[([^]]*)\]")
    found, waiting = list(project["dependencies"]), list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop(0)]:
            inner = own.fullmatch(line)
            if inner:
                waiting += inner[1].split(",")
            else:
                found.append(line)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    for requirement in requirements(Path(sys.argv[1]).read_text("utf-8"), sys.argv[2].split(",")):
        sys.stdout.write(requirement + "\n")
