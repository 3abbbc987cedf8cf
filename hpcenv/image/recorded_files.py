"""Files in an image, made with a recipe of `hpcenv image init`, that describe the image's packages.

Runs on: LOGIN NODE. The recipe writes them, `hpcenv lock` and the lint rules read them.
"""

FOLDER = "/usr/share/hpcenv"
REPORT = f"{FOLDER}/pip-report.json"
REQUIREMENTS = f"{FOLDER}/requirements.lock"
BUILT = f"{FOLDER}/built.json"
SYSTEM_PACKAGES = f"{FOLDER}/dpkg-packages.txt"
