"""Whatever can be written can be read again, and is the same."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcenv.errors import LockfileInvalid
from hpcenv.locking import difference
from hpcenv.project import document, lockfile, toml_files
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.workspace import read_lockfile
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.codec import SCHEMA, decode_record, encode_record
from hpcenv.records.facts import Difference, Facts, Interface, Network, Route
from hpcenv.records.manifest import Bind, Environment, Expectation, GpuNeeds, Manifest, PackageExpectation, Setting
from hpcenv.records.verdict import Finding, NodeVerdict, Rendezvous, Verdict

FOLDER = Path(tempfile.mkdtemp(prefix="hpcenv-roundtrip-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
LOCKFILE_SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "reference" / "lockfile.schema.json"

# TOML holds every character but lone surrogates.
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
WORD = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
NUMBER = st.integers(min_value=-(2**63), max_value=2**63 - 1)
OR_NONE = st.none()
FACT = st.one_of(TEXT, NUMBER, st.lists(TEXT, max_size=5).map(tuple))
SEVERITY = st.sampled_from(["must", "warn", "info"])
TABLE = st.dictionaries(TEXT.filter(bool), TEXT, max_size=3)

FACTS = st.fixed_dictionaries({"python.version": TEXT, "torch.version": TEXT}).flatmap(
    lambda base: st.dictionaries(
        st.one_of(
            st.tuples(st.sampled_from(["python", "torch", "system", "loaded"]), WORD).map(".".join),
            st.tuples(st.just("libs"), WORD.map(lambda word: "lib-" + word), WORD).map(".".join),
        ),
        FACT,
        max_size=6,
    ).map(lambda more: {**more, **base})
)
DIST = st.builds(
    lockfile.DistTable,
    name=WORD,
    version=TEXT,
    build=OR_NONE | TEXT,
    tags=st.lists(TEXT, max_size=3).map(tuple),
    source=OR_NONE | TEXT,
    record_sha256=OR_NONE | TEXT,
    content_sha256=OR_NONE | TEXT,
    reason=OR_NONE | TEXT,
    direct_url=OR_NONE
    | st.builds(
        lockfile.DirectUrlTable,
        url=OR_NONE | TEXT,
        commit_id=OR_NONE | TEXT,
        editable=OR_NONE | st.booleans(),
        dirty=OR_NONE | st.booleans(),
        diff_sha256=OR_NONE | TEXT,
        files_sha256=OR_NONE | TEXT,
        hash=TEXT,
    ),
    wheel=OR_NONE
    | st.builds(
        lockfile.WheelTable,
        filename=OR_NONE | TEXT,
        sha256=OR_NONE | TEXT,
        proof=st.sampled_from(
            ["direct-url", "embedded-lock", "install-report", "record", "index-only", "none", "built"]
        ),
        built=OR_NONE
        | st.builds(
            lockfile.BuiltTable,
            compiler=TEXT,
            nvcc=OR_NONE | TEXT,
            arch_list=OR_NONE | TEXT,
            source_sha256=OR_NONE | TEXT,
        ),
    ),
)
CONTAINER = st.builds(
    lockfile.ContainerTable,
    reference=TEXT,
    index_digest=OR_NONE | TEXT,
    manifest_digest=TEXT,
    config_digest=TEXT,
    rootfs_chain_id=TEXT,
    platform=TEXT,
    env_digest=TEXT,
    nvidia=TABLE,
    layers=st.lists(
        st.builds(lockfile.LayerTable, digest=TEXT, diff_id=TEXT, size=NUMBER, media_type=TEXT), max_size=3
    ).map(tuple),
    sif=st.builds(
        lockfile.SifTable,
        sha256=TEXT,
        size=NUMBER,
        partition_sha256=TEXT,
        partition_size=NUMBER,
        compression=TEXT,
        arch=TEXT,
        built_with=TEXT,
        builder=TEXT,
        mksquashfs_args=st.lists(TEXT, max_size=5).map(tuple),
        source_date_epoch=NUMBER,
    ),
)


@st.composite
def lockfiles(draw: st.DrawFn) -> Lockfile:
    """Any lockfile that the model allows."""
    container = draw(OR_NONE | CONTAINER)
    dists = tuple(draw(st.lists(DIST, max_size=4)))
    image = "host" if container is None else draw(TEXT.filter(lambda text: text != "host"))
    packages = lockfile.PackagesTable(
        count=len(dists),
        env_digest=draw(TEXT),
        content_digest=draw(OR_NONE | TEXT),
        conda_count=draw(OR_NONE | NUMBER),
        conda_digest=draw(OR_NONE | TEXT),
        unlisted_count=draw(NUMBER),
        unlisted_digest=draw(TEXT),
        dist=dists,
    )
    host = lockfile.LockedHostTable(
        driver_min=draw(OR_NONE | TEXT), gpu=draw(OR_NONE | TEXT), nvidia_require=draw(TABLE)
    )
    code = st.builds(
        lockfile.CodeTable, commit=OR_NONE | TEXT, dirty=OR_NONE | st.booleans(), diff_sha256=TEXT, script_sha256=TEXT
    )
    run = st.builds(
        lockfile.RunTable,
        argv=st.lists(TEXT, max_size=3).map(tuple),
        nodes=NUMBER,
        gpus_per_node=NUMBER,
        nproc_per_node=NUMBER,
        backend=TEXT,
        env=TABLE,
    )
    return Lockfile(
        schema_=lockfile.SCHEMA,
        revision=lockfile.REVISION,
        generated_by=draw(TEXT),
        fingerprint=draw(TEXT),
        kind="host" if container is None else "sif",
        asked=lockfile.AskedTable(image=image, python=draw(OR_NONE | TEXT), platform=draw(TEXT)),
        container=container,
        facts=draw(FACTS),
        packages=packages,
        host=host,
        determinism=lockfile.LockedDeterminismTable(profile=draw(st.sampled_from(["off", "seeded", "bitwise"]))),
        code=draw(OR_NONE | code),
        run=draw(OR_NONE | run),
        unknown=draw(TABLE),
        policy=draw(st.dictionaries(TEXT.filter(bool), SEVERITY, max_size=3)),
    )


@given(lockfiles())
def test_a_valid_lockfile_is_accepted_and_comes_back(locked: Lockfile) -> None:
    text = toml_files.dumps(lockfile.to_data(locked), header="h")
    data = lockfile.from_data(toml_files.loads(text.encode(), Path("x"), error=LockfileInvalid))
    valid, problems = document.parse(Lockfile, data)
    assert problems == ()
    assert valid == locked


def written(locked: Lockfile, name: str = "one") -> Path:
    path = FOLDER / f"{name}.lock.toml"
    path.write_text(toml_files.dumps(lockfile.to_data(locked), header="h"), newline="")
    return path


@settings(deadline=None)
@given(lockfiles())
def test_a_lockfile_comes_back_as_it_was_written(locked: Lockfile) -> None:
    again = read_lockfile(written(locked))
    assert again == locked
    assert written(again, "two").read_bytes() == written(locked).read_bytes()


@settings(deadline=None)
@given(lockfiles())
def test_and_keeps_its_fingerprint(locked: Lockfile) -> None:
    again = read_lockfile(written(locked))
    assert lockfile.fingerprint(lockfile.to_data(again)) == lockfile.fingerprint(lockfile.to_data(locked))


@settings(deadline=None)
@given(lockfiles())
def test_and_keeps_to_the_schema(locked: Lockfile) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(LOCKFILE_SCHEMA.read_text()))
    assert [error.message for error in validator.iter_errors(lockfile.to_data(locked))] == []


@settings(deadline=None)
@given(lockfiles(), lockfiles())
def test_two_lockfiles_differ_in_nothing_if_and_only_if_they_say_the_same(one: Lockfile, other: Lockfile) -> None:
    def compare(left: Lockfile, right: Lockfile) -> tuple[difference.Change, ...]:
        severities = [lockfile.severities_of(left), lockfile.severities_of(right)]
        return difference.compare(difference.of_lockfile(left), difference.of_lockfile(right), severities=severities)

    assert compare(one, one) == ()
    there = [(c.field, c.left, c.right, c.severity) for c in compare(one, other)]
    back = [(c.field, c.right, c.left, c.severity) for c in compare(other, one)]
    assert there == back


# -- records ------------------------------------------------------------------------------

ANY = st.text(max_size=20)
VALUE: Any = st.one_of(
    ANY,
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(ANY, max_size=3).map(tuple),
)
SETTING = st.builds(Setting, name=ANY, value=ANY, origin=ANY, reason=ANY)
RESULT = st.sampled_from(["match", "mismatch", "unknown"])


ENVIRONMENT = st.builds(
    Environment,
    kind=st.sampled_from(["sif", "host"]),
    python=ANY,
    sif=ANY,
    apptainer=ANY,
    binds=st.lists(st.builds(Bind, source=ANY, target=ANY, read_only=st.booleans()), max_size=2).map(tuple),
    gpus=st.booleans(),
)
EXPECTATION = st.builds(
    Expectation, field=ANY, value=VALUE, severity=SEVERITY, rule=st.sampled_from(["equal", "at-least"]), origin=ANY
)
PACKAGE = st.builds(PackageExpectation, name=ANY, version=ANY, record_sha256=ANY, content_sha256=ANY)
NEEDS = st.builds(
    GpuNeeds,
    cuda=ANY,
    arch_list=st.lists(ANY, max_size=3).map(tuple),
    require=st.dictionaries(ANY, ANY, max_size=2),
    table=ANY,
)
MANIFEST = st.builds(
    Manifest,
    schema=st.just(SCHEMA),
    cluster=st.sampled_from(["slurm", "local"]),
    backend=st.sampled_from(["nccl", "gloo"]),
    environment=ENVIRONMENT,
    settings=st.lists(SETTING, max_size=2).map(tuple),
    args=st.lists(ANY, max_size=3).map(tuple),
    expectations=st.lists(EXPECTATION, max_size=3).map(tuple),
    packages=st.lists(PACKAGE, max_size=3).map(tuple),
    gpu_needs=OR_NONE | NEEDS,
)
NETWORK = st.builds(
    Network,
    first_node=ANY,
    interfaces=st.lists(st.builds(Interface, name=ANY, addresses=st.lists(ANY, max_size=2).map(tuple)), max_size=2).map(
        tuple
    ),
    routes=st.lists(st.builds(Route, target=ANY, source=ANY, interface=ANY), max_size=2).map(tuple),
    free_port=OR_NONE | st.integers(),
    variables=st.lists(SETTING, max_size=2).map(tuple),
)
FACTS_OF_A_NODE = st.builds(
    Facts,
    schema=st.just(SCHEMA),
    values=st.dictionaries(ANY, VALUE, max_size=4),
    network=NETWORK,
    differences=st.lists(
        st.builds(Difference, field=ANY, locked=ANY, found=ANY, note=ANY, unknown=st.booleans()), max_size=2
    ).map(tuple),
    sif=OR_NONE | st.builds(CheckedSif),
    seconds=st.dictionaries(ANY, st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)
VERDICT = st.builds(
    Verdict,
    schema=st.just(SCHEMA),
    result=RESULT,
    nodes=st.lists(st.builds(NodeVerdict, result=RESULT), max_size=3).map(tuple),
    findings=st.lists(st.builds(Finding, result=RESULT, severity=SEVERITY, note=ANY), max_size=3).map(tuple),
    rendezvous=OR_NONE | st.builds(Rendezvous),
    settings=st.dictionaries(ANY, st.lists(SETTING, max_size=2).map(tuple), max_size=2),
)


@settings(deadline=None)
@given(st.one_of(MANIFEST, FACTS_OF_A_NODE, VERDICT))
def test_a_record_comes_back_as_it_was_written(record: Any) -> None:
    text = encode_record(record)
    again = decode_record(type(record), text, origin="test")
    assert again == record
    assert encode_record(again) == text
