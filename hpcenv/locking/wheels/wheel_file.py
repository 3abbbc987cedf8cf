"""Read one wheel file.

Runs on: LOGIN NODE, in the process beside pip: standard library and pip only.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import BinaryIO

from hpcenv.locking.wheels.pip_session import hash_chunks
from hpcenv.locking.wheels.wheel_record import Contradiction, NotAWheel, wheel_programs, wheel_record_digests

LOCAL_WHOLE_BYTES = 64 << 20  # every file in a local wheel of up to this size is compared with RECORD


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelReading:
    """What was read of one wheel file.

    Attributes:
        records: the RECORD digests that an installation of it can have.
        programs: name and sha256 of its programs.
        sha256: of the file; None if it was not read as a whole.
        problem: how it contradicts itself.
        unread: why it was not read as a whole.
    """

    records: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    sha256: str | None = None
    problem: str = ""
    unread: str = ""


def read_local(file: BinaryIO, filename: str, deadline: float) -> WheelReading:
    """Read a wheel that is wholly at hand, and its sha256.

    Raises:
        NotAWheel: it is not a valid wheel.
        OSError: it cannot be read.
        Unreachable: the time limit is reached.
    """
    sha256 = hash_chunks(iter(lambda: file.read(1 << 20), b""), deadline)
    return examine(file, filename, sha256=sha256, whole=file.tell() <= LOCAL_WHOLE_BYTES)


def examine(file: BinaryIO, filename: str, *, sha256: str | None, whole: bool) -> WheelReading:
    """Compare a wheel with its own RECORD.

    Args:
        file: the wheel.
        filename: its name.
        sha256: its hash, None if it is not known.
        whole: compare the content of every file, not only names and sizes.

    Raises:
        NotAWheel: it is not a valid wheel.
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
