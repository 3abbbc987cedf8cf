"""Read the compatibility table from the plain data of its file. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE. Nodes read no TOML: they get the plain data from the manifest.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcenv.errors import SpecError
from hpcenv.judge.compat.compat_table import SCHEMA, Capability, Compat, Forward, GpuModel, Pair, TorchRelease
from hpcenv.judge.compat.gpu_names import names
from hpcenv.judge.compat.versions import Numbers, is_requirement, numbers, padded, sort_key

# Libraries for which the metadata of a torch wheel requires a version.
LIBRARIES = ("cudnn", "nccl", "cublas", "cudart", "cusparselt", "nvshmem", "triton")


def parse(data: Mapping[str, Any], *, origin: str = "table.toml") -> Compat:
    """Return the table from the plain data of its file.

    Args:
        data: what the TOML parser returned.
        origin: the file, for messages.

    Raises:
        SpecError: the schema is not known, or a key is missing or wrong.
    """
    table = _Table(data, origin=origin)
    if table.integer("schema") != SCHEMA:
        raise SpecError(
            f"`{origin}` has schema {data['schema']}, this hpcenv reads schema {SCHEMA}",
            hint="install hpcenv again; scripts/renew-compat writes a newer table",
        )
    cuda = table.table("cuda")
    floor, packaged = cuda.table("floor"), cuda.table("packaged")
    drivers = {padded(sort_key(k), 3): v for k, v in packaged.table("driver").versions().items()}
    others = {padded(one, 3) for one in cuda.table("toolkits").version_list("others")}
    return Compat(
        origin=origin,
        dated=min(_dates(table), default="0001-01-01"),
        floors={int(major): version for major, version in floor.table("driver").versions().items() if major.isdigit()},
        floors_source=floor.source(),
        packaged=drivers,
        packaged_source=packaged.source(),
        toolkits=frozenset({*drivers, *others}),
        capabilities=_parse_capabilities(cuda.table("capability")),
        forward=_parse_forward(cuda.table("forward")),
        torches=_parse_torches(table.table("torch")),
        pairs=_parse_pairs(table.table("pair")),
        gpus=_parse_gpus(table.table("gpu")),
    )


def _dates(table: _Table) -> Iterator[str]:
    """Yield the date at which each part of the table was read."""
    if "retrieved" in table.data:
        yield table.date("retrieved")
    for key, value in table.data.items():
        if isinstance(value, Mapping):
            yield from _dates(table.table(key))


class _Table:
    """A table in the file, together with its place in the file, so that an error can name the key."""

    def __init__(self, data: Any, *, origin: str, path: str = "", source: str = "") -> None:
        self.data, self.origin, self.path, self._source = data, origin, path, source
        if not isinstance(data, Mapping):
            raise self.problem("", "a table")

    def problem(self, key: str, expected: str) -> SpecError:
        where = f"{self.path}.{key}".strip(".")
        return SpecError(f"`{self.origin}`: `{where}` is missing or not {expected}")

    def table(self, key: str) -> _Table:
        inner = self.data.get(key)
        if not isinstance(inner, Mapping):
            raise self.problem(key, "a table")
        return _Table(inner, origin=self.origin, path=f"{self.path}.{key}".strip("."), source=self._source)

    def tables(self, key: str, *, source: str) -> list[_Table]:
        rows = self.data.get(key)
        if not isinstance(rows, list):
            raise self.problem(key, "a list of tables")
        path = f"{self.path}.{key}".strip(".")
        return [_Table(r, origin=self.origin, path=f"{path}[{n}]", source=source) for n, r in enumerate(rows)]

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or not value:
            raise self.problem(key, "text")
        return value

    def integer(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.problem(key, "a whole number")
        return value

    def version(self, key: str) -> str:
        if numbers(str(self.data.get(key))) is None:
            raise self.problem(key, "a version")
        return self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self.problem(key, "a list of text")
        return tuple(value)

    def date(self, key: str) -> str:
        value = str(self.data.get(key))
        try:
            return dt.date.fromisoformat(value).isoformat()
        except ValueError:
            raise self.problem(key, "a date such as 2026-11-20") from None

    def requirement(self, key: str) -> str:
        if not is_requirement(str(self.data.get(key))):
            raise self.problem(key, "a requirement such as `==2.27.5` or `>=13.1,<13.2`")
        return self.text(key)

    def version_list(self, key: str) -> tuple[Numbers, ...]:
        found = [numbers(text) for text in self.texts(key)]
        if None in found:
            raise self.problem(key, "a list of versions")
        return tuple(one for one in found if one is not None)

    def optional_version(self, key: str) -> str:
        return self.version(key) if key in self.data else ""

    def versions(self) -> dict[str, str]:
        """Return the whole table, if its keys and values are versions."""
        for key in self.data:
            if numbers(key) is None:
                raise self.problem(key, "a version as the key")
        return {key: self.version(key) for key in self.data}

    def source(self) -> str:
        """Return the source of the table and the date of reading.

        A row without a source has the source of its parent.
        """
        if self._source and "source" not in self.data:
            return self._source
        return f"{self.text('source')}, read {self.date('retrieved')}"


def _parse_forward(table: _Table) -> Forward:
    branches = [int(branch) for branch in table.texts("branches") if branch.isdigit()]
    packages = table.table("package")
    rows: dict[str, dict[int, str]] = {}
    for cuda in packages.data:
        words = packages.texts(cuda)
        if numbers(cuda) is None or len(words) != len(branches) or set(words) - {"yes", "no", "same"}:
            raise packages.problem(cuda, "one of `yes`, `no`, `same` for each branch")
        rows[cuda] = dict(zip(branches, words, strict=True))
    only = table.data.get("data-centre-only")
    if not isinstance(only, bool):
        raise table.problem("data-centre-only", "true or false")
    return Forward(package=rows, data_centre_only=only, source=table.source())


def _parse_capabilities(table: _Table) -> dict[str, Capability]:
    rows = table.table("row")
    found = {}
    for capability in rows.data:
        if len(numbers(capability) or ()) != 2:
            raise rows.problem(capability, "a compute capability as the key")
        row = rows.table(capability)
        last_driver = row.optional_version("last-driver")
        if last_driver and not last_driver.isdigit():
            raise row.problem("last-driver", "a driver branch such as `580`")
        found[capability] = Capability(
            first_toolkit=row.version("first-toolkit"),
            last_toolkit=row.optional_version("last-toolkit"),
            last_driver=last_driver,
            source=row.source() if "source" in row.data else table.source(),
        )
    return found


def _parse_torches(table: _Table) -> tuple[TorchRelease, ...]:
    releases = [_parse_torch(row) for row in table.tables("release", source=table.source())]
    return tuple(sorted(releases, key=lambda release: sort_key(release.version), reverse=True))


def _parse_torch(row: _Table) -> TorchRelease:
    builds, aarch64, python = row.table("builds"), row.table("aarch64"), _parse_range(row, "python")
    return TorchRelease(
        version=row.version("version"),
        uploaded=row.date("uploaded"),
        python=python,
        requires_python=row.text("requires-python"),
        pypi=row.version("pypi"),
        builds={cuda: _parse_arch_list(builds, cuda) for cuda in builds.data},
        aarch64={cuda: _parse_arch_list(aarch64, cuda) for cuda in aarch64.data},
        aarch64_pypi=row.data.get("aarch64-pypi", row.version("pypi") if aarch64.data else "cpu"),
        aarch64_python=_parse_range(row, "aarch64-python") if "aarch64-python" in row.data else python,
        source=row.source(),
        free_threaded=row.texts("free-threaded") if "free-threaded" in row.data else (),
        libraries={name: row.requirement(name) for name in LIBRARIES if name in row.data},
        triton_before_python=row.optional_version("triton-before-python"),
    )


def _parse_range(row: _Table, key: str) -> tuple[str, str]:
    first, _, last = str(row.data.get(key)).partition("-")
    if numbers(first) is None or numbers(last) is None:
        raise row.problem(key, "a range of Python versions such as `3.10-3.14`")
    return first, last


def _parse_pairs(table: _Table) -> dict[str, Pair]:
    return {name: _parse_pair(name, table.table(name)) for name in table.data}


def _parse_pair(name: str, row: _Table) -> Pair:
    torch = row.table("torch")
    doubts = row.table("doubt") if "doubt" in row.data else _Table({}, origin=row.origin)
    return Pair(
        name=name,
        torch={version: torch.requirement(version) for version in torch.data},
        source=row.source(),
        doubt={
            version: (doubts.table(version).requirement("torch"), doubts.table(version).text("why"))
            for version in doubts.data
        },
    )


def _parse_arch_list(builds: _Table, cuda: str) -> tuple[str, ...]:
    """Return the architectures of a build with torch's names: `8.0 9.0+PTX` becomes sm_80, sm_90, compute_90."""
    text = builds.data[cuda]
    words = text.split() if isinstance(text, str) else ["?"]
    found = [re.fullmatch(r"([0-9]+)\.([0-9])([af]?)(\+PTX)?", word) for word in words]
    if numbers(cuda) is None or not all(found):
        raise builds.problem(cuda, "compute capabilities such as `8.0 9.0+PTX`")
    kernels = [f"sm_{m[1]}{m[2]}{m[3]}" for m in found if m]
    return (*kernels, *(f"compute_{m[1]}{m[2]}{m[3]}" for m in found if m and m[4]))


def _parse_gpus(table: _Table) -> dict[str, GpuModel]:
    counts = table.table("sm-count").table("number")
    memory = table.table("memory").table("gb")
    drivers = table.table("driver")
    on_aarch64 = table.table("aarch64").texts("names")
    variants = table.table("variants")
    blocks = [
        (table.table("other"), False, table.source()),
        (table.table("data-centre"), True, table.source()),
        (variants.table("data-centre"), True, variants.source()),
    ]
    gpus: dict[str, GpuModel] = {}
    for block, data_centre, source in blocks:
        for capability in block.data:
            if len(numbers(capability) or ()) != 2:
                raise block.problem(capability, "a compute capability as the key")
            for name in block.texts(capability):
                if not names(name):
                    raise block.problem(capability, f"a list of GPU names; {name!r} is not one")
                model = GpuModel(
                    name=name,
                    compute_capability=capability,
                    data_centre=data_centre,
                    sm_count=counts.integer(name) if name in counts.data else None,
                    source=source,
                    memory_gb=_parse_sizes(memory, name) if name in memory.data else (),
                    machine="aarch64" if name in on_aarch64 else "",
                    first_driver=drivers.table("first").optional_version(name),
                    listed_driver=drivers.table("listed").optional_version(name),
                    driver_source=drivers.source(),
                )
                gpus.update(dict.fromkeys(names(name), model))
    return gpus | _longer_names(gpus, counts)


def _longer_names(gpus: Mapping[str, GpuModel], counts: _Table) -> dict[str, GpuModel]:
    """Return the GPUs with longer names, such as `H100 PCIe`.

    Only a longer name tells the number of multiprocessors.
    """
    found: dict[str, GpuModel] = {}
    for name in counts.data:
        first = next(iter(name.split()), "")
        base = gpus.get("".join(re.findall(r"[a-z0-9]+", first.lower())))
        if base is not None and base.name != name:
            found[names(name)[0]] = replace(base, name=name, sm_count=counts.integer(name))
    return found


def _parse_sizes(memory: _Table, name: str) -> tuple[int, ...]:
    sizes = memory.data[name]
    if not isinstance(sizes, list) or not sizes or not all(type(one) is int and one > 0 for one in sizes):
        raise memory.problem(name, "a list of sizes in GB")
    return tuple(sizes)
