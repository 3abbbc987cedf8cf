"""The programs behind the services of a session, and what to type where an environment lacks one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from hpcenv.errors import Command, Hint

# What pip installs for each word of `hpcenv image init --tools`. The first package is the one without which nothing
# starts.
TOOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"jupyter": ("jupyterlab", "ipykernel"), "tensorboard": ("tensorboard",), "debug": ("debugpy", "py-spy")}
)


def lacking(kinds: Collection[str], packages: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of service for which a locked environment has no program.

    Args:
        packages: names of the packages in the lockfile.
    """
    return tuple(kind for kind in kinds if not set(TOOLS.get(kind, ())) <= set(packages))


def how_to_add(kind: str, *, on_host: bool) -> Hint:
    """Return the two lines to type where the environment lacks the program of a service."""
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
