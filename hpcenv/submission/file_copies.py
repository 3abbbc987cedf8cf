"""A program that copies small files: `python -I -S file_copies.py SOURCE TARGET [SOURCE TARGET ...]`.

Runs on: LOGIN NODE. `node_code` starts it, and the submission goes on while the files are copied. It imports nothing
of hpcenv, so it starts in 10 ms. Its message on standard error says which file could not be copied.
"""

import os
import sys


def main(paths: list[str]) -> int:
    """Copy each SOURCE to its TARGET, whose folder is made; return the exit status."""
    sources, targets = paths[::2], paths[1::2]
    try:
        for folder in dict.fromkeys(map(os.path.dirname, targets)):
            os.makedirs(folder, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            try:
                copy(source, target)
            except (FileNotFoundError, PermissionError):
                if not source.endswith(".pyc"):  # the nodes can compile it themselves
                    raise
    except OSError as error:
        sys.stderr.write(f"{error.strerror}: {error.filename or os.path.dirname(targets[0])}\n")
        return 1
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
