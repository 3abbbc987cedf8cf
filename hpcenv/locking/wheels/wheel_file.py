"""Read one wheel file.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import BinaryIO

from hpcenv.locking.wheels.pip_session import hash_chunks
from hpcenv.locking.wheels.wheel_record import Contradiction, NotAWheel, wheel_programs, wheel_record_digests

LOCAL_WHOLE_BYTES = 64 << 20  # up to this size, every file in a local wheel is compared with RECORD


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelReading:
    """The data that was read from one wheel file.

    Attributes:
        records: the RECORD digests that an installation of the wheel can have.
        programs: name and sha256 of the wheel's programs.
        sha256: the hash of the file; None if the file was not read as a whole.
        problem: how the wheel contradicts its own RECORD.
        unread: why the file was not read as a whole.
    """

    records: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    sha256: str | None = None
    problem: str = ""
    unread: str = ""


def read_local(file: BinaryIO, filename: str, deadline: float) -> WheelReading:
    """Read a wheel from a local file, and compute its sha256.

    Raises:
        NotAWheel: the file is not a valid wheel.
        OSError: the file cannot be read.
        Unreachable: the time limit is reached.
    """
    sha256 = hash_chunks(iter(lambda: file.read(1 << 20), b""), deadline)
    return examine(file, filename, sha256=sha256, whole=file.tell() <= LOCAL_WHOLE_BYTES)


def examine(file: BinaryIO, filename: str, *, sha256: str | None, whole: bool) -> WheelReading:
    """Compare a wheel with its own RECORD.

    Args:
        file: the wheel.
        filename: its name.
        sha256: the hash of the file; None if it is not known.
        whole: compare the content of every file, not only names and sizes.

    Raises:
        NotAWheel: the file is not a valid wheel.
    """
    try:
        with zipfile.ZipFile(file) as wheel:
            records = wheel_record_digests(wheel, filename, whole=whole)
            programs = wheel_programs(wheel, filename)
    except Contradiction as error:
        return WheelReading(records=error.records, sha256=sha256, problem=str(error))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, IndexError) as error:
        raise NotAWheel(f"it is not a valid wheel ({type(error).__name__})") from error
    return WheelReading(records=records, programs=programs, sha256=sha256)
