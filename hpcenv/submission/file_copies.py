"""A program that copies small files: `python -I -S file_copies.py SOURCE TARGET [SOURCE TARGET ...]`.

Runs on: LOGIN NODE. `node_code` starts it, and the submission goes on while the files are copied. It imports nothing
of hpcenv, so it starts in 10 ms. It prints `copied` when all files are there. If one is not, it writes the number of
the system's error and the path to standard error.
"""

import os
import sys

DONE = "copied"


def main(paths: list[str]) -> int:
    """Copy each SOURCE to its TARGET, whose folder is made; return the exit status."""
    sources, targets = paths[::2], paths[1::2]
    at = ""
    try:
        for at in dict.fromkeys(map(os.path.dirname, targets)):
            os.makedirs(at, exist_ok=True)
        for source, at in zip(sources, targets, strict=True):
            try:
                copy(source, at)
            except (FileNotFoundError, PermissionError):
                if not source.endswith(".pyc"):  # the nodes can compile it themselves
                    raise
    except OSError as error:
        sys.stderr.write(f"{error.errno} {error.filename or at}\n")  # a failed write names no file
        return 1
    sys.stdout.write(DONE)
    return 0


def copy(source: str, target: str) -> None:
    """Copy a file with its time, not with its mode: a read-only installation must not make a read-only copy."""
    with open(source, "rb", buffering=0) as file:
        content, status = file.readall(), os.fstat(file.fileno())
    with open(target, "wb", buffering=0) as written:
        while content:
            content = content[written.write(content) :]
        os.utime(written.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
