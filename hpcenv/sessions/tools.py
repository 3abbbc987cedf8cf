"""The programs behind the services of a session, and what to type if an environment lacks a program. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from hpcenv.errors import Command, Hint

# The packages that pip installs for each word of `hpcenv image init --tools`. Without the first package, nothing
# starts.
TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"jupyter": ("jupyterlab", "ipykernel"), "tensorboard": ("tensorboard",), "debug": ("debugpy", "py-spy")}
)


def lacking(kinds: Collection[str], packages: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of service for which a locked environment lacks packages.

    Args:
        packages: names of the packages in the lockfile.
    """
    return tuple(kind for kind in kinds if not set(TOOLS.get(kind, ())) <= set(packages))


def how_to_add(kind: str, *, on_host: bool) -> Hint:
    """Return a hint with the two commands to type if the environment lacks the program of a service."""
    if on_host:
        return (
            "install it into the environment, and lock that again:\n",
            Command("python3", "-m", "pip", "install", *TOOLS[kind]),
            "\n",
            Command("hpcenv", "lock"),
        )
    return (
        "put it over the image, as another environment:\n",
        Command("hpcenv", "image", "init", "--tools", kind),
        "\n",
        Command("sh", "image/add-tools.sh"),
    )
