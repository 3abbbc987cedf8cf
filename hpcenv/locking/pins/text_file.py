"""Read a text file up to a size limit. The file may come from a person whom the user does not know.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from pathlib import Path

from hpcenv.errors import FileUnusable, LockfileInvalid
from hpcenv.records.files import read_file

# The largest lockfile of another tool that was seen has 5 MiB.
LONGEST_FILE = 16 << 20


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FileUnusable: the file cannot be read.
        LockfileInvalid: the file is not text, or is too large.
    """
    try:
        return read_file(path, most=LONGEST_FILE).decode("utf-8-sig")
    except OSError as error:
        hint = "name a file: a pylock.toml, requirements.txt, pixi.lock or conda-lock.yml"
        raise FileUnusable(f"cannot read `{path}`", why=error.strerror, hint=hint) from error
    except UnicodeDecodeError as error:
        raise LockfileInvalid(f"`{path}` is not UTF-8 text", why=str(error)) from error
    except ValueError as error:
        raise LockfileInvalid(f"cannot read {str(path)!r}", why=str(error)) from error
