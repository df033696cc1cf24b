"""Prints the lowest versions that pyproject.toml allows, as constraints for pip."""

import pathlib
import re
import tomllib

PYPROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"

if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in requirements:
            if lowest := re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement):
                print("{}=={}".format(*lowest.groups()))
