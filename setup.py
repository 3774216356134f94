"""What setup.cfg cannot say: packages that stand beside ``fleetpipe/``, and addresses of a page.

``fleetpipe/dygraph`` and ``fleetpipe/static`` are links to the folders of these names at the top
level, and a checkout may lack them (Windows; an unpacked archive). So neither is built from.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

# An editable install is the tree itself on the path, where editors and type checkers look and where
# a folder named fleetpipe beside a script hides nothing. In strict mode it is built as a wheel is.
tree = "editable_wheel" in sys.argv and "strict" not in sys.argv
beside = [] if tree else ["dygraph", "static"]
packages = find_packages(include=["fleetpipe*"])
packages += [f"fleetpipe.{name}" for name in find_packages(include=[f"{top}*" for top in beside])]

# The Makefile knows it where the clone's origin is an address of the web; else it is a placeholder.
repository = os.environ.get("REPOSITORY_URL") or "https://example.org/fleetpipe"

setup(
    url=repository,
    project_urls={
        "Source": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    },
    packages=sorted(set(packages)),
    package_dir={"": ".", **{f"fleetpipe.{top}": top for top in beside}},
    # A page of the package stands outside of the repository: there, links into it keep their text,
    # and its pictures are left out.
    long_description=re.sub(
        r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*|\[([^]]+)\]\((?!https?:)[^)]*\)",
        r"\1",
        Path("README.md").read_text(encoding="utf-8"),
    ),
)
