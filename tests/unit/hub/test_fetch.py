"""Fetch from a real HTTP server that speaks the hub's interface: resumed, checked, and safe against wrong answers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcenv.errors import DataUnavailable, FileUnusable
from hpcenv.hub import tree as trees
from hpcenv.hub.access import find_access
from hpcenv.hub.fetch import FetchedTree, fetch, resolve
from hpcenv.hub.guard import MOST_PAGES
from hpcenv.identity import data
from hpcenv.image.store.store import Store
from hpcenv.image.store.store_folder import open_store
from hpcenv.progress import Event
from hpcenv.project.hub_reference import parse_locked, parse_repository
from tests.hub_server import COMMIT, Hub, cut_after, entry, hang_after, sha256

BIG = os.urandom(3_000_000)
FILES = {"config.json": b"{}", "model.safetensors": BIG, "sub/a b.txt": b"hello\n", "empty": b""}
WANTED = f"lab/tiny@{COMMIT}"
# The library writes what has arrived in pieces of this size (huggingface_hub 2.4, constants.DOWNLOAD_CHUNK_SIZE).
PIECE = 10 << 20
HUGE = {"model.safetensors": os.urandom(14_000_000)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def serve() -> Iterator[Any]:
    hubs: list[Hub] = []

    def make(files: dict[str, bytes] | None = None, **words: Any) -> Hub:
        hubs.append(Hub(FILES if files is None else files, **{"lfs": ("model.safetensors",), **words}))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def get(hub: Hub, store: Store, *patterns: str, wanted: str = WANTED, token: str = "", **words: Any) -> FetchedTree:
    environ = hub.environ(**({"HF_TOKEN": token} if token else {"HF_TOKEN_PATH": "/dev/null/none"}))
    return fetch(parse_locked(wanted), patterns, find_access(environ), store, **words)


def content(tree: FetchedTree) -> dict[str, bytes]:
    root = Path(tree.path)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_all_files_arrive_and_the_second_call_asks_nothing(serve: Any, store: Store) -> None:
    hub = serve(page=2)
    events: list[Event] = []
    tree = get(hub, store, on_event=events.append)
    assert content(tree) == FILES
    assert (tree.files, tree.size, tree.fetched, tree.already) == (4, len(BIG) + 8, len(BIG) + 8, False)
    assert len([path for path in hub.asked() if "/tree/" in path]) == 3, "every page of the list"
    done = [(event.what, event.done, event.total) for event in events if event.phase == "fetch"]
    assert done[-1] == (WANTED, len(BIG) + 8, len(BIG) + 8)
    for path in Path(tree.path).rglob("*"):
        assert not path.is_file() or (path.stat().st_mode & 0o777, path.stat().st_mtime) == (0o444, trees.FILE_TIME)
    before = len(hub.asked())
    again = get(hub, store)
    assert (again.path, again.already, again.fetched, len(hub.asked())) == (tree.path, True, 0, before)


def test_the_token_goes_to_the_hub_and_not_to_its_storage(serve: Any, store: Store) -> None:
    hub = serve(token="hf_secret")
    with pytest.raises(DataUnavailable) as caught:
        get(hub, store)
    assert "refuses access" in caught.value.what
    assert "restricted" in str(caught.value.why)
    assert content(get(hub, store, token="hf_secret")) == FILES
    sent = [headers.get("Authorization") for _, headers in hub.api.requests]
    assert sent[0] is None
    assert set(sent[1:]) == {"Bearer hf_secret"}
    assert [headers.get("Authorization") for _, headers in hub.storage.requests] == [None]
    for path in store.root.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes()
        assert not path.is_file() or b"secret-signature" not in path.read_bytes()


def test_a_connection_that_breaks_is_continued(serve: Any, store: Store) -> None:
    faults = [cut_after(12_000_000), (503, {"Retry-After": "0"}, b""), cut_after(500_000)]
    hub = serve(HUGE, faults={"model.safetensors": faults})
    assert content(get(hub, store)) == HUGE
    # The library writes pieces of 10 MiB.
    ranges = [headers.get("Range") for _, headers in hub.storage.requests]
    assert ranges == [None, *[f"bytes={PIECE}-"] * 3]


def test_a_killed_fetch_is_continued(serve: Any, store: Store, tmp_path: Path) -> None:
    hub = serve(HUGE, faults={"model.safetensors": [hang_after(12_000_000)]})
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[[data]]\nhub = "{WANTED}"\n')
    environ = {**os.environ, **hub.environ(HPCENV_STORE=str(store.root), HOME=str(tmp_path))}
    words = [sys.executable, "-m", "hpcenv", "data", "fetch"]
    child = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size == PIECE for path in trees.partial_downloads(trees.parts_folder(store.root))):
        assert time.monotonic() < deadline, child.poll()
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    assert b"run the same command again" in said
    assert not (trees.hub_folder(store.root) / "trees").exists(), "no half of a tree"
    assert content(get(hub, store)) == HUGE
    assert [headers.get("Range") for _, headers in hub.storage.requests] == [None, f"bytes={PIECE}-"]


def test_wrong_bytes_are_refused_and_named(serve: Any, store: Store, tmp_path: Path) -> None:
    wrong = b"x" * len(BIG)
    hub = serve(faults={"model.safetensors": [(200, {}, wrong)] * 2})
    with pytest.raises(DataUnavailable) as caught:
        get(hub, store)
    assert caught.value.what == "the file model.safetensors arrived twice with wrong bytes"
    assert sha256(BIG) in str(caught.value.why)
    assert not trees.locate(store.root, parse_locked(WANTED), ()).folder.exists()
    small, other = serve(faults={"config.json": [(200, {}, b"[]")] * 2}), open_store(tmp_path / "other", create=True)
    with pytest.raises(DataUnavailable) as caught:
        get(small, other)
    assert "config.json arrived twice" in caught.value.what
    assert content(get(small, other)) == FILES


def test_more_bytes_than_listed_are_refused(serve: Any, store: Store) -> None:
    hub = serve(faults={"config.json": [(200, {}, b"{}" * 1000)] * 9})
    with pytest.raises(DataUnavailable, match="config.json"):
        get(hub, store)


def test_a_changed_file_is_named_and_fetched_again(serve: Any, store: Store) -> None:
    hub = serve()
    tree = get(hub, store)
    located = trees.locate(store.root, parse_locked(WANTED), ())
    model, text = Path(tree.path, "model.safetensors"), Path(tree.path, "sub", "a b.txt")
    state = trees.require_unchanged(located, "size-and-time")
    assert state == data.read_state(tree.path, "size-and-time")
    model.chmod(0o644)
    with open(model, "r+b") as file:
        file.seek(1000)
        file.write(bytes([BIG[1000] ^ 1]))
    Path(tree.path, "more").write_bytes(b"")
    text.unlink()
    with pytest.raises(DataUnavailable) as caught:
        trees.require_unchanged(located, "size-and-time")
    assert str(caught.value.why).splitlines()[:3] == [
        "model.safetensors: changed since it was fetched", "more: is not of the hub", "sub/a b.txt: is missing",
    ]  # fmt: skip
    notes: list[str] = []
    again = get(hub, store, on_event=lambda event: notes.append(event.what))
    assert content(again) == FILES
    assert not again.already
    assert any("model.safetensors: changed since it was fetched" in note for note in notes)
    assert [path for path in hub.asked(storage=True)] == ["/model.safetensors?Signature=secret-signature"] * 2


def test_a_change_that_hides_its_time_is_found_by_content(serve: Any, store: Store) -> None:
    hub = serve()
    tree = get(hub, store)
    located = trees.locate(store.root, parse_locked(WANTED), ())
    model = Path(tree.path, "model.safetensors")
    model.chmod(0o644)
    model.write_bytes(BIG[:-1] + bytes([BIG[-1] ^ 1]))
    model.chmod(0o444)
    os.utime(model, (trees.FILE_TIME, trees.FILE_TIME))
    trees.require_unchanged(located, "size-and-time")
    with pytest.raises(DataUnavailable) as caught:
        trees.require_unchanged(located, "sha256")
    assert "model.safetensors: has the sha256" in str(caught.value.why)
    assert get(hub, store).already
    assert not get(hub, store, check=True).already
    assert content(get(hub, store, check=True)) == FILES


@pytest.mark.parametrize("compare", ["size-and-time", "list", "sha256"])
def test_the_state_is_the_same_wherever_it_is_fetched(serve: Any, tmp_path: Path, compare: Any) -> None:
    hub = serve()
    states = set()
    for name in ("one", "two"):
        store = open_store(tmp_path / name, create=True)
        get(hub, store)
        states.add(trees.require_unchanged(trees.locate(store.root, parse_locked(WANTED), ()), compare))
    assert len(states) == 1


def test_a_part_of_a_repository_has_its_own_folder(serve: Any, store: Store) -> None:
    hub = serve()
    part = get(hub, store, "*.json", "sub/")
    assert content(part) == {name: FILES[name] for name in ("config.json", "sub/a b.txt")}
    assert hub.asked(storage=True) == []
    whole = get(hub, store)
    assert content(whole) == FILES
    assert part.path != whole.path
    assert os.stat(f"{part.path}/config.json").st_ino == os.stat(f"{whole.path}/config.json").st_ino
    assert get(hub, store, "sub/", "*.json").already


def test_a_name_that_leaves_the_folder_writes_nothing(serve: Any, store: Store, tmp_path: Path) -> None:
    hub = serve({"x": b"boo"}, lfs=(), listed=[entry("../../../../../x", b"boo")])
    with pytest.raises(DataUnavailable):
        get(hub, store)
    assert not list(tmp_path.rglob("x"))


def test_too_little_space_is_said_before_anything_is_fetched(serve: Any, store: Store) -> None:
    hub = serve(
        {"w": b"x"},
        lfs=("w",),
        listed=[{**entry("w", b"x"), "lfs": {"oid": "0" * 64, "size": 1 << 49, "pointerSize": 1}}],
    )
    with pytest.raises(FileUnusable) as caught:
        get(hub, store)
    assert "there is not enough space" in caught.value.what
    assert WANTED in str(caught.value.why)
    assert [path for path in hub.asked() if "/resolve/" in path] == []


@pytest.mark.parametrize(
    ("files", "listed", "said"),
    [
        ({}, ["no", "list"], "TypeError"),
        ({}, [{"type": "file"}], "KeyError"),
        ({}, [], "it has no files"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(serve: Any, store: Store, files: Any, listed: Any, said: str) -> None:
    with pytest.raises(DataUnavailable) as caught:
        get(serve(files, lfs=(), listed=listed), store)
    assert said in str(caught.value.why)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, {}, b"<html>a login page</html>"), "not JSON"),
        ((200, {}, b"{}"), "it has no files"),
        ((200, {}, b"3"), "TypeError"),
        ((200, {}, b"[" * 100_000), "RecursionError"),
        ((200, {"Content-Encoding": "gzip"}, b"[]"), "compressed"),
        ((200, {"Link": '<http://other.example/x>; rel="next"'}, b"[]"), "leads to other.example"),
        ((200, {"Link": '<http://[>; rel="next"'}, b"[]"), "another host"),
        ((302, {"Location": "http://localhost:9/x"}, b""), "leads to localhost"),
        ((302, {"Location": "https://[x"}, b""), "another host"),
        ((302, {"Location": "http://127.0.0.1:abc/x"}, b""), "not valid"),
        ((302, {"Location": "ftp://127.0.0.1/x"}, b""), "another host"),
    ],
)
def test_an_answer_that_does_not_follow_the_interface_is_refused(
    serve: Any, store: Store, answer: Any, said: str | None
) -> None:
    hub = serve()
    hub.api.paths[f"/api/models/lab/tiny/tree/{COMMIT}"] = answer
    with pytest.raises(DataUnavailable) as caught:
        get(hub, store)
    assert said is None or said in str(caught.value.why)


def test_a_list_without_end_is_refused(serve: Any, store: Store) -> None:
    hub = serve()
    path = f"/api/models/lab/tiny/tree/{COMMIT}"
    # Each page is empty, and names itself as the next one.
    hub.api.paths[path] = (200, {"Link": f'<{hub.endpoint}{path}>; rel="next"'}, b"[]")
    with pytest.raises(DataUnavailable, match="cannot be used") as caught:
        get(hub, store)
    assert f"more than {MOST_PAGES} pages" in str(caught.value.why)
    assert len(hub.asked()) == MOST_PAGES


def test_a_branch_is_resolved(serve: Any) -> None:
    hub = serve()
    access = find_access(hub.environ())
    assert resolve(parse_repository("lab/tiny"), access) == COMMIT
    with pytest.raises(DataUnavailable) as caught:
        resolve(parse_repository("lab/tiny@v9"), access)
    assert "has no revision `v9`" in str(caught.value.why)
    assert caught.value.hint == "the newest commit: `hpcenv data resolve lab/tiny`"
    with pytest.raises(DataUnavailable) as caught:
        resolve(parse_repository("lab/other"), access)
    assert str(caught.value.hint).startswith("check the name")
    hub.api.paths["/api/models/lab/tiny/revision/main"] = (200, {}, b'{"sha": "main"}')
    with pytest.raises(DataUnavailable, match="cannot be used"):
        resolve(parse_repository("lab/tiny"), access)


def test_a_hub_that_is_down_is_named() -> None:
    with pytest.raises(DataUnavailable) as caught:
        resolve(parse_repository("lab/resolve"), find_access({"HF_ENDPOINT": "http://127.0.0.1:1"}))
    assert caught.value.what == "the hub `127.0.0.1:1` is down"


def test_a_host_without_an_address_is_told_from_a_refused_connection() -> None:
    with pytest.raises(DataUnavailable) as caught:
        resolve(parse_repository("lab/refused"), find_access({"HF_ENDPOINT": "http://nothing.invalid"}))
    assert caught.value.what == "the hub `nothing.invalid` is not a known host"


def test_a_file_whose_storage_is_down_is_not_taken_for_an_unknown_host(serve: Any, store: Store) -> None:
    hub = serve()
    hub.api.paths[f"/lab/tiny/resolve/{COMMIT}/model.safetensors"] = (
        302,
        {"Location": "http://127.0.0.1:1/resolve/x"},
        b"",
    )
    with pytest.raises(DataUnavailable) as caught:
        get(hub, store)
    assert caught.value.what == f"`127.0.0.1:1`, which the hub `{hub.api.host}` named, is down"


def test_a_hub_without_tls_is_refused_in_the_words_of_the_library(serve: Any) -> None:
    hub = serve()
    access = find_access({"HF_ENDPOINT": hub.endpoint.replace("http:", "https:")})
    with pytest.raises(DataUnavailable, match="cannot be used with https") as caught:
        resolve(parse_repository("lab/tiny"), access)
    assert "_ssl.c" not in str(caught.value.why)
    assert len(str(caught.value.why).splitlines()[0]) > 10, "what the TLS library says"


def test_several_calls_at_the_same_time_succeed(serve: Any, store: Store, tmp_path: Path) -> None:
    hub = serve()
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[[data]]\nhub = "{WANTED}"\n')
    environ = {**os.environ, **hub.environ(HPCENV_STORE=str(store.root), HOME=str(tmp_path))}
    words = [sys.executable, "-m", "hpcenv", "data", "fetch"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    children = [subprocess.Popen(words, cwd=tmp_path, env=environ, **pipes) for _ in range(3)]
    for child in children:
        said, _ = child.communicate(timeout=50)
        assert child.returncode == 0, said
    again = get(hub, store)
    assert again.already
    assert content(again) == FILES
    assert sorted(path.name for path in Path(again.path).parent.iterdir()) == [COMMIT, f"{COMMIT}.json"], "nothing else"


@pytest.mark.parametrize("kind", ["changed", "file", "link"])
def test_what_is_in_the_place_of_a_folder_and_is_not_it_is_replaced(
    serve: Any, store: Store, tmp_path: Path, kind: str
) -> None:
    hub = serve()
    folder = trees.locate(store.root, parse_locked(WANTED), ()).folder

    def spoil(event: Event) -> None:
        if event.phase == "resolve" and kind == "changed":
            folder.mkdir(parents=True)
            (folder / "config.json").write_bytes(b"{}")
        elif event.phase == "resolve":
            folder.parent.mkdir(parents=True)
            folder.write_bytes(b"") if kind == "file" else folder.symlink_to(tmp_path)

    tree = get(hub, store, on_event=spoil)
    assert content(tree) == FILES
    assert not folder.is_symlink()
    assert sorted(path.name for path in folder.parent.iterdir()) == [COMMIT, f"{COMMIT}.json"], "nothing else"
    assert tmp_path.is_dir()


def test_partial_downloads_of_last_week_are_removed_and_their_size_is_listed(
    serve: Any, store: Store, tmp_path: Path, hpcenv: Any
) -> None:
    folder = trees.parts_folder(store.root) / "models--lab--tiny"
    folder.mkdir(parents=True)
    paths = [folder / f"{digit * 64}.part" for digit in "012"]
    for path in paths:
        path.write_bytes(b"x" * 1000)
    for path in (paths[0], paths[2]):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HPCENV_STORE": str(store.root)}
    listed = hpcenv("data", "list", "--json", cwd=tmp_path, environ=environ)
    assert json.loads(listed.stdout)["data"]["partial"] == 3000, listed.stderr
    shown = hpcenv("data", "list", cwd=tmp_path, environ=environ)
    assert "not complete" in shown.stderr
    notes: list[str] = []
    get(serve(), store, on_event=lambda event: notes.append(event.what))
    assert [path.exists() for path in paths] == [False, True, False]
    assert any("removed partial downloads" in note for note in notes)


def test_a_file_system_without_hard_links_gets_copies(serve: Any, store: Store) -> None:
    # One file has at most a few thousand links on most file systems; here the limit is that of another device.
    other = Path("/dev/shm")
    if not other.is_dir() or not os.access(other, os.W_OK) or os.stat(other).st_dev == os.stat(store.root).st_dev:
        pytest.skip("NOT RUN: /dev/shm is not another file system than the one of the tests")
    place = other / f"hpcenv-test-{os.getpid()}"
    try:
        (trees.hub_folder(store.root) / "trees").symlink_to(place)
        place.mkdir()
        tree = get(serve(), store)
        assert content(tree) == FILES
        assert {path.stat().st_mtime for path in Path(tree.path).rglob("*") if path.is_file()} == {trees.FILE_TIME}
        hub = serve(
            {"w": b"x"},
            lfs=("w",),
            listed=[{**entry("w", b"x"), "lfs": {"oid": "0" * 64, "size": 1 << 49, "pointerSize": 1}}],
        )
        with pytest.raises(FileUnusable) as caught:
            get(hub, store, "w")
        assert f"enough space in `{place}" in str(caught.value.what).replace(str(store.root / "hub/trees"), str(place))
        assert "each file is there twice" in str(caught.value.why)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_xet_is_used_only_if_asked_for(serve: Any, store: Store, tmp_path: Path) -> None:
    hub = serve()
    # The library asks with HEAD first whether the hub has a file in Xet. The server has none there, and sends all by HTTP.
    get(hub, store)
    assert set(hub.api.commands) == {"GET"}
    access = find_access(hub.environ(HF_HUB_DISABLE_XET="0"))
    other = open_store(tmp_path / "other", create=True)
    assert content(fetch(parse_locked(WANTED), (), access, other)) == FILES
    assert "HEAD" in hub.api.commands


def test_a_hub_that_wants_a_long_pause_is_an_error_with_its_words(serve: Any, store: Store) -> None:
    hub = serve()
    answer = (429, {"Retry-After": "3600", "ratelimit": '"api";r=0;t=300'}, b'{"error": "too many requests"}')
    hub.api.paths[f"/api/models/lab/tiny/revision/{COMMIT}"] = answer
    started = time.monotonic()
    with pytest.raises(DataUnavailable, match="refuses more requests") as caught:
        get(hub, store)
    assert "too many requests" in str(caught.value.why)
    assert time.monotonic() - started < 60


def test_without_the_library_the_error_names_the_extra(serve: Any, tmp_path: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None; from hpcenv.__main__ import main; sys.exit(main())"
    (tmp_path / "hpcenv.toml").write_text(f'image = "host"\n[[data]]\nhub = "{WANTED}"\n')
    environ = {"PATH": os.environ["PATH"], **serve().environ(HPCENV_STORE=f"{tmp_path}/s", HOME=str(tmp_path))}

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", code, "data", *words]
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    for words in (("fetch",), ("resolve", "lab/tiny")):
        done = typed(*words)
        assert done.returncode == 8, done.stderr
        assert "hint: pip install 'huggingface_hub>=2,<3'" in done.stderr
    assert typed("list").returncode == 0
