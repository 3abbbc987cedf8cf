"""Whose variables a command sees: in a session those of the user, not of the session."""

from __future__ import annotations

import os
import pwd

from hpcenv.project.context import of_user


def test_a_command_in_a_session_knows_the_user_s_home() -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert of_user({"HOME": "/x", "HPCENV_RUN": "lab", "A": "1"}) == {"HOME": home, "HPCENV_RUN": "lab", "A": "1"}
    assert of_user({"HOME": "/x"}) == {"HOME": "/x"}
    in_image = {"HOME": "/hpcenv/home", "HPCENV_RUN": "lab", "SINGULARITY_CONTAINER": "/x.sif"}
    assert of_user(in_image) == in_image
