"""Paths of files that describe an image's packages, if a recipe of `hpcenv image init` made the image.

Runs on: LOGIN NODE. The recipe writes these files, and `hpcenv lock` and the lint rules read them.
"""

FOLDER = "/usr/share/hpcenv"
REPORT = f"{FOLDER}/pip-report.json"
REQUIREMENTS = f"{FOLDER}/requirements.lock"
BUILT = f"{FOLDER}/built.json"
SYSTEM_PACKAGES = f"{FOLDER}/dpkg-packages.txt"
