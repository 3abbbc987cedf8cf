"""blobs: layers come home whole through every fault of a registry, a disk and other processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from http_server import Served, break_after, sha

from hpcenv.errors import FileUnusable, ImageUnavailable

# The client is imported here and not by the first test: tests measure time.
from hpcenv.image.reference import parse_reference
from hpcenv.image.registry import blobs, client, resolve  # noqa: F401
from hpcenv.image.registry.blobs import BlobSpec, TransferLimits
from hpcenv.image.store import lease

BIG = bytes(range(256)) * 8192  # 2 MiB
QUICK = TransferLimits(stall=5.0, pauses=(0.01,))


def specs(*bodies):
    return [BlobSpec(digest=sha(body), size=len(body)) for body in bodies]


@pytest.fixture
def served(monkeypatch, tmp_path):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    it = Served()
    yield it
    it.close()


def leases(tmp_path):
    """Return the folder of the store's leases."""
    folder = tmp_path / "leases"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def fetch(served, tmp_path):
    """Fetch bodies from the served registry into the store of this test."""

    def call(*bodies, environ=None, limits=QUICK, **options):
        reference = parse_reference(f"docker://{served.host}/lab/img:1")
        environ = environ or {"HOME": str(tmp_path / "home")}
        with resolve.open_source(reference, plain_http=True, environ=environ, timeout=5.0) as source:
            store = tmp_path / "store"
            return blobs.fetch_all(specs(*bodies), source, store, leases=leases(tmp_path), limits=limits, **options)

    return call


def parts(tmp_path):
    return sorted((tmp_path / "store/sha256").glob(".*.part"))


def whole(paths, *bodies):
    """Whether the files are the bodies, read-only, and nothing else lies there."""
    return [path.read_bytes() for path in paths] == list(bodies) and all(
        path.stat().st_mode & 0o777 == 0o444 and path.name == sha(body)[7:]
        for path, body in zip(paths, bodies, strict=True)
    )


# --- the plain way -------------------------------------------------------------------------


def test_blobs_arrive_in_the_order_asked_for(served, fetch, tmp_path):
    bodies = [b"one", BIG, b"", b"three" * 1000]
    for body in bodies:
        served.blob(body)
    events = []
    paths = fetch(*bodies, on_event=events.append)
    assert whole(paths, *bodies)
    assert sorted(path.name for path in (tmp_path / "store/sha256").iterdir()) == sorted(sha(b)[7:] for b in bodies)
    ended = {event.what: event for event in events if event.done == event.total}
    assert {what: event.total for what, event in ended.items()} == {sha(body): len(body) for body in bodies}
    assert {(event.phase, event.unit) for event in events} == {("fetch", "bytes")}


def test_what_is_there_is_not_asked_for_again(served, fetch):
    served.blob(BIG)
    first = fetch(BIG)
    served.requests.clear()
    events = []
    assert fetch(BIG, on_event=events.append) == first
    assert served.requests == []
    assert [(event.done, event.total) for event in events] == [(len(BIG), len(BIG))]


def test_a_layer_that_comes_twice_is_fetched_once(served, fetch):
    digest = served.blob(b"same")
    assert whole(fetch(b"same", b"same"), b"same", b"same")
    assert served.asked(digest) == [None]


def test_more_blobs_than_workers(served, fetch):
    bodies = [f"layer {number}".encode() for number in range(20)]
    for body in bodies:
        served.blob(body)
    assert whole(fetch(*bodies, workers=3), *bodies)
    assert whole(fetch(*bodies, workers=1), *bodies)


def test_the_folder_for_blobs_is_as_open_as_the_store(served, fetch, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o2775)
    served.blob(b"x")
    fetch(b"x")
    assert (tmp_path / "store/sha256").stat().st_mode & 0o7777 == 0o2775


@pytest.mark.parametrize(
    "wrong",
    [
        [BlobSpec(digest="sha256:x", size=1)],
        [BlobSpec(digest="sha256:" + "../" * 21 + "a", size=1)],
        [BlobSpec(digest=sha(b""), size=-1)],
        [BlobSpec(digest=sha(b"x"), size=1), BlobSpec(digest=sha(b"x"), size=2)],
        [BlobSpec(digest=sha(b"x"), size=1 << 50)],
    ],
)
def test_nonsense_is_refused_before_anything_is_asked(wrong, tmp_path):
    with pytest.raises(ImageUnavailable):
        blobs.fetch_all(wrong, None, tmp_path, leases=tmp_path)
    assert not list(tmp_path.rglob("*.part"))


# --- the registry's faults -----------------------------------------------------------------


def test_a_broken_transfer_goes_on_where_it_broke(served, fetch, tmp_path):
    digest = served.blob(BIG, faults=[break_after(1_000_000), break_after(500_000)])
    assert whole(fetch(BIG), BIG)
    ranges = served.asked(digest)
    assert ranges[0] is None
    begins = [int(re.fullmatch(r"bytes=(\d+)-", said)[1]) for said in ranges[1:]]
    assert len(begins) == 2
    # What was in flight when the connection broke may be lost; not more.
    assert 0 < begins[0] <= 1_000_000 < begins[1] <= 1_500_000
    assert parts(tmp_path) == []


def test_a_registry_without_ranges_sends_it_all_again(served, fetch):
    digest = served.blob(BIG, ranges=False, faults=[break_after(1_000_000)])
    assert whole(fetch(BIG), BIG)
    assert len(served.asked(digest)) == 2


def test_what_has_arrived_is_kept_for_the_next_call(served, fetch, tmp_path):
    digest = served.blob(BIG, faults=[break_after(1_000_000), *[(500, {}, b"boom")] * 9])
    with pytest.raises(ImageUnavailable, match="answered with status 500") as error:
        fetch(BIG, limits=TransferLimits(pauses=(0.01,), attempts=3))
    assert error.value.why == "boom"
    [part] = parts(tmp_path)
    arrived = part.stat().st_size
    assert 0 < arrived <= 1_000_000
    served.blob(BIG)
    served.requests.clear()
    notes = []
    assert whole(fetch(BIG, on_event=lambda event: event.phase == "note" and notes.append(event.what)), BIG)
    assert served.asked(digest) == [f"bytes={arrived}-"]
    assert parts(tmp_path) == []
    [note] = notes
    assert ": continuing after " in note


def test_wrong_bytes_are_asked_for_once_more(served, fetch):
    served.blob(BIG, faults=[(200, {}, BIG[::-1])])
    assert whole(fetch(BIG), BIG)


def test_wrong_bytes_twice_are_an_error_that_names_both(served, fetch, tmp_path):
    served.blob(BIG, faults=[(200, {}, BIG[::-1])] * 2)
    with pytest.raises(ImageUnavailable, match="arrived twice with wrong bytes") as error:
        fetch(BIG)
    assert error.value.why == f"expected {sha(BIG)}\nreceived {sha(BIG[::-1])}"
    assert list((tmp_path / "store/sha256").iterdir()) == []
    assert whole(fetch(BIG), BIG)


@pytest.mark.parametrize("body", [BIG + b"x", BIG[:-1]])
def test_another_size_than_the_manifest_says(served, fetch, body):
    served.blob(BIG, faults=[(200, {}, body)] * 9)
    with pytest.raises(ImageUnavailable, match="another size") as error:
        fetch(BIG)
    assert error.value.why == f"expected {len(BIG)} bytes\nannounced {len(body)}"


def test_more_bytes_than_announced_by_the_manifest_in_a_chunked_answer(served, fetch, tmp_path):
    def chunked(handler, body):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(4):
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            handler.wfile.write(b"0\r\n\r\n")

    served.blob(BIG, faults=[chunked] * 9)
    with pytest.raises(ImageUnavailable) as error:
        fetch(BIG)
    assert error.value.why == f"expected {len(BIG)} bytes\nreceived more"
    assert parts(tmp_path) == []


@pytest.mark.parametrize(
    "said", ["bytes 5-9/10", "bytes 0-2097151/2097152", "bytes 1000000-2097151/7", "rubbish", "", "bytes 9-1/*"]
)
def test_another_range_than_asked_for_is_not_believed(served, fetch, said):
    digest = served.blob(BIG, faults=[break_after(1_000_000), (206, {"Content-Range": said} if said else {}, b"12345")])
    assert whole(fetch(BIG), BIG)
    assert [said is None for said in served.asked(digest)] == [True, False, True]


def test_a_range_that_the_registry_does_not_have(served, fetch):
    digest = served.blob(BIG, faults=[break_after(1_000_000), (416, {"Content-Range": "bytes */7"}, b"")])
    assert whole(fetch(BIG), BIG)
    assert [said is None for said in served.asked(digest)] == [True, False, True]


def test_an_unwanted_part_is_refused(served, fetch):
    served.blob(BIG, faults=[(206, {"Content-Range": "bytes 0-4/2097152"}, b"12345")])
    with pytest.raises(ImageUnavailable, match="status 206"):
        fetch(BIG)


def test_a_body_is_not_unpacked_on_the_way(served, fetch):
    import gzip

    packed = gzip.compress(BIG)
    served.blob(packed, faults=[(200, {"Content-Encoding": "gzip"}, packed)])
    assert whole(fetch(packed), packed)
    [(_, headers)] = served.requests
    assert headers["Accept-Encoding"] == "identity"


def test_retry_after_is_honoured(served, fetch):
    digest = served.blob(b"x" * 100, faults=[(429, {"Retry-After": "1"}, b"")])
    events = []
    begin = time.monotonic()
    fetch(b"x" * 100, on_event=events.append)
    assert 1.0 <= time.monotonic() - begin < 4.0
    assert len(served.asked(digest)) == 2
    assert any(event.phase == "note" and "waiting 1 s" in event.what for event in events)


def test_a_date_to_retry_after_is_read_by_the_servers_own_clock(served, fetch):
    date = {"Retry-After": "Tue, 01 Jan 2030 00:00:00 GMT"}
    served.blob(b"x", faults=[(503, date, b"")] * 9)
    begin = time.monotonic()
    with pytest.raises(ImageUnavailable, match="status 503"):
        fetch(b"x")
    assert time.monotonic() - begin < 3


def test_a_long_retry_after_is_said_at_once(served, fetch):
    served.blob(b"x", faults=[(429, {"Retry-After": "21600"}, b"")])
    begin = time.monotonic()
    with pytest.raises(ImageUnavailable, match="refuses more requests") as error:
        fetch(b"x")
    assert "21600 s" in error.value.hint
    assert time.monotonic() - begin < 3


def test_a_layer_that_the_registry_does_not_have(served, fetch):
    with pytest.raises(ImageUnavailable, match="does not have the layer") as error:
        fetch(b"never pushed")
    assert "not distributable" in error.value.hint


def test_a_registry_that_falls_silent_in_the_middle(served, fetch):
    gate = threading.Event()

    def silent(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:1000])
        handler.wfile.flush()
        gate.wait(10)

    digest = served.blob(BIG, faults=[silent])
    begin = time.monotonic()
    events = []
    assert whole(fetch(BIG, limits=TransferLimits(stall=0.5, pauses=(0.01,)), on_event=events.append), BIG)
    # Image trial 10: nothing was said of the silence.
    assert [event.what for event in events if event.phase == "note"] == [
        f"the registry `{served.host}` sent no bytes for 0.5 s: asking again for the layer {digest[:19]} (attempt 2 of 5)"
    ]
    gate.set()
    assert time.monotonic() - begin < 5
    assert served.asked(digest)[1] == "bytes=1000-"


def test_a_registry_that_drips(served, fetch, tmp_path):
    gate = threading.Event()

    def drip(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not gate.wait(0.02):
                handler.wfile.write(b"x")

    served.blob(BIG, faults=[drip] * 9)
    with pytest.raises(ImageUnavailable, match="is too slow") as error:
        fetch(BIG, limits=TransferLimits(stall=0.4, slowest=1000, pauses=(0.01,), attempts=2))
    gate.set()
    assert error.value.why == "less than 400 bytes arrived in 0.4 s"


def test_one_failure_ends_the_others_and_keeps_what_they_have(served, fetch, tmp_path):
    gate = threading.Event()

    def slow(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            for begin in range(0, len(body), 65536):
                handler.wfile.write(body[begin : begin + 65536])
                gate.wait(0.1)

    def refuse(handler, body):
        time.sleep(0.5)
        return 418, {}, b""

    served.blob(BIG, faults=[slow])
    served.blob(b"bad", faults=[refuse])
    begin = time.monotonic()
    with pytest.raises(ImageUnavailable, match="status 418"):
        fetch(BIG, b"bad")
    gate.set()
    assert time.monotonic() - begin < 2.5
    [part] = parts(tmp_path)
    assert 0 < part.stat().st_size < len(BIG)


# --- who may see it ------------------------------------------------------------------------


def test_a_token_that_expires_in_mid_pull_is_renewed(served, fetch):
    tokens, given = iter(["first", "second", "third"]), []
    challenge = f'Bearer realm="http://{served.host}/token",service="reg"'

    def give(handler):
        given.append(next(tokens))
        return 200, {}, f'{{"token":"{given[-1]}"}}'.encode()

    served.paths["/token"] = give
    served.blob(BIG, faults=[break_after(1_000_000)])
    path = f"/v2/lab/img/blobs/{sha(BIG)}"
    blob = served.paths[path]

    def guarded(handler):
        shown = handler.headers.get("Authorization")
        # The first token is good for the first part only.
        good = shown == ("Bearer second" if "Range" in handler.headers else "Bearer first")
        return blob(handler) if good else (401, {"Www-Authenticate": challenge}, b"")

    served.paths[path] = guarded
    assert whole(fetch(BIG), BIG)
    assert given == ["first", "second"]


def test_a_token_that_is_never_good_enough_is_not_asked_for_forever(served, fetch):
    challenge = f'Bearer realm="http://{served.host}/token",service="reg"'
    served.paths["/token"] = (200, {}, b'{"token":"t"}')
    served.paths[f"/v2/lab/img/blobs/{sha(BIG)}"] = (401, {"Www-Authenticate": challenge}, b"")
    with pytest.raises(ImageUnavailable, match="was denied"):
        fetch(BIG)
    assert len(served.requests) <= 4


def test_workers_share_one_login(served, fetch):
    given = []
    challenge = f'Bearer realm="http://{served.host}/token",service="reg"'

    def give(handler):
        given.append(1)
        return 200, {}, b'{"token":"t"}'

    bodies = [f"layer {number}".encode() for number in range(12)]
    for body in bodies:
        answer = served.paths[f"/v2/lab/img/blobs/{served.blob(body)}"]

        def guarded(handler, answer=answer):
            good = handler.headers.get("Authorization") == "Bearer t"
            return answer(handler) if good else (401, {"Www-Authenticate": challenge}, b"")

        served.paths[f"/v2/lab/img/blobs/{sha(body)}"] = guarded
    served.paths["/token"] = give
    assert whole(fetch(*bodies), *bodies)
    assert len(given) == 1


def test_storage_that_a_registry_redirects_to_is_shown_no_credentials(served, fetch, tmp_path):
    storage = Served()
    try:
        storage.blob(BIG)
        path = f"/v2/lab/img/blobs/{sha(BIG)}"
        # Another name for the loopback: another host.
        place = f"http://localhost:{storage.server.server_port}{path}"
        # requests looks here before it follows a redirect.
        (tmp_path / ".netrc").write_text("machine localhost login me password hidden\n")
        (tmp_path / ".netrc").chmod(0o600)

        def send_on(handler):
            if "Authorization" not in handler.headers:
                return 401, {"Www-Authenticate": 'Basic realm="r"'}, b""
            return 307, {"Location": place}, b""

        served.paths[path] = send_on
        environ = {
            "HOME": str(tmp_path), "APPTAINER_DOCKER_USERNAME": "u", "APPTAINER_DOCKER_PASSWORD": "s3cret-word",
        }  # fmt: skip
        assert whole(fetch(BIG, environ=environ), BIG)
        [(_, headers)] = storage.requests
        assert "Authorization" not in headers
        assert any("Authorization" in headers for _, headers in served.requests)
    finally:
        storage.close()


def test_an_expired_link_to_storage_is_asked_for_anew(served, fetch):
    storage = Served()
    try:
        storage.blob(BIG, faults=[(403, {}, b"<Error>expired</Error>")] * 2)
        path = f"/v2/lab/img/blobs/{sha(BIG)}"
        served.paths[path] = (307, {"Location": f"http://localhost:{storage.server.server_port}{path}"}, b"")
        assert whole(fetch(BIG), BIG)
    finally:
        storage.close()


def test_redirects_in_a_circle(served, fetch):
    path = f"/v2/lab/img/blobs/{sha(BIG)}"
    served.paths[path] = (307, {"Location": path}, b"")
    with pytest.raises(ImageUnavailable, match="redirects in a circle"):
        fetch(BIG, limits=TransferLimits(pauses=(0.01,), attempts=1))


# --- the store -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["truncated", "longer", "writable", "link", "empty"])
def test_a_cache_file_that_is_not_the_blob_is_fetched_anew(served, fetch, tmp_path, change):
    served.blob(BIG)
    [path] = fetch(BIG)
    path.chmod(0o644)
    if change == "truncated":
        os.truncate(path, 1000)
    elif change == "longer":
        os.truncate(path, len(BIG) + 1)
    elif change == "empty":
        os.truncate(path, 0)
    elif change == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    if change != "writable":
        path.chmod(0o444)
    assert whole(fetch(BIG), BIG)
    assert not path.is_symlink()


@pytest.mark.parametrize("same", [True, False])
def test_a_blob_that_others_may_write_to_is_hashed_not_fetched(served, fetch, same):
    served.blob(BIG)
    [path] = fetch(BIG)
    path.chmod(0o664)
    if not same:
        path.write_bytes(bytes(len(BIG)))
    before = len(served.requests)
    with open(path, "r+b") as old:
        assert whole(fetch(BIG), BIG)
        old.write(b"too late")
    assert path.read_bytes() == BIG
    assert (len(served.requests) == before, path.stat().st_mode & 0o777) == (same, 0o444)
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []


def test_a_blob_that_its_reader_found_wrong_is_discarded_and_fetched(served, fetch):
    served.blob(BIG)
    [path] = fetch(BIG)
    blobs.discard(path)
    blobs.discard(path)  # another process was faster
    assert not path.exists()
    assert whole(fetch(BIG), BIG)


def test_a_part_with_wrong_bytes_costs_one_more_transfer(served, fetch, tmp_path):
    digest = served.blob(BIG, faults=[break_after(1_000_000), *[(500, {}, b"")] * 2])
    with pytest.raises(ImageUnavailable):
        fetch(BIG, limits=TransferLimits(pauses=(0.01,), attempts=2))
    [part] = parts(tmp_path)
    with part.open("r+b") as file:
        file.write(b"!")
    served.blob(BIG)
    served.requests.clear()
    assert whole(fetch(BIG), BIG)
    assert [said is None for said in served.asked(digest)] == [False, True]


@pytest.mark.parametrize("size", [len(BIG), len(BIG) + 1])
def test_a_part_that_is_as_long_as_the_blob_or_longer(served, fetch, tmp_path, size):
    place = tmp_path / "store/sha256"
    place.mkdir(parents=True)
    (place / f".{sha(BIG)[7:]}.part").write_bytes((BIG + b"x")[:size])
    digest = served.blob(BIG)
    assert whole(fetch(BIG), BIG)
    assert served.asked(digest) == ([] if size == len(BIG) else [None])


@pytest.mark.ordinary_user
@pytest.mark.parametrize("mode", [0o444, 0])
def test_a_part_that_may_not_be_written_is_copied_or_fetched_anew(served, fetch, tmp_path, mode):
    """It belongs to another member of a shared store, or its process was killed just before the last rename."""
    place = tmp_path / "store/sha256"
    place.mkdir(parents=True)
    part = place / f".{sha(BIG)[7:]}.part"
    part.write_bytes(BIG[:1000])
    part.chmod(mode)
    digest = served.blob(BIG)
    assert whole(fetch(BIG), BIG)
    assert served.asked(digest) == ["bytes=1000-" if mode else None]
    assert [path.name for path in place.iterdir()] == [sha(BIG)[7:]]


# --- other processes, and the end of this one ----------------------------------------------

CHILD = """
import sys
from pathlib import Path
from hpcenv.image.reference import parse_reference
from hpcenv.image.registry import blobs, resolve
host, store, leases, digest, size = sys.argv[1:]
reference = parse_reference(f"docker://{host}/lab/img:1")
with resolve.open_source(reference, plain_http=True, environ={"HOME": "/nonexistent"}) as source:
    spec = blobs.BlobSpec(digest=digest, size=int(size))
    say = lambda event: print(event.done or event.what, flush=True)
    print(*blobs.fetch_all([spec], source, Path(store), leases=Path(leases), on_event=say))
"""


@contextlib.contextmanager
def child(served, tmp_path, body, *, before="", **options):
    code = before + CHILD
    folders = str(tmp_path / "store"), str(leases(tmp_path))
    argv = [sys.executable, "-c", code, served.host, *folders, sha(body), str(len(body))]
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with subprocess.Popen(
        argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, **options
    ) as it:
        try:
            yield it
        finally:
            it.kill()


def hold(gate, count=1_000_000):
    """Return a fault: `count` bytes come, the rest when the gate opens."""

    def fault(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(body[:count])
            handler.wfile.flush()
            gate.wait(60)
            handler.wfile.write(body[count:])

    return fault


def wait_for_part(tmp_path, size):
    deadline = time.monotonic() + 60
    while not any(part.stat().st_size >= size for part in parts(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_process_leaves_what_the_next_one_goes_on_with(served, fetch, tmp_path):
    gate = threading.Event()
    digest = served.blob(BIG, faults=[hold(gate)])
    with child(served, tmp_path, BIG) as process:
        wait_for_part(tmp_path, 1_000_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
    gate.set()
    assert whole(fetch(BIG), BIG)
    assert served.asked(digest) == [None, "bytes=1000000-"]
    assert parts(tmp_path) == []


def test_an_interrupted_process_ends_soon_and_leaves_its_part(served, fetch, tmp_path):
    gate = threading.Event()
    served.blob(BIG, faults=[hold(gate)])
    with child(served, tmp_path, BIG) as process:
        wait_for_part(tmp_path, 1_000_000)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
        assert time.monotonic() - begin < 5
        assert said.rstrip().endswith("KeyboardInterrupt")
    gate.set()
    assert whole(fetch(BIG), BIG)


def test_a_second_process_waits_and_shows_who_downloads(served, fetch, tmp_path):
    gate = threading.Event()
    digest = served.blob(BIG, faults=[hold(gate)])
    events = []

    def listen(event):
        events.append(event)
        if event.phase == "wait":
            gate.set()

    with child(served, tmp_path, BIG) as process:
        wait_for_part(tmp_path, 1_000_000)
        assert whole(fetch(BIG, on_event=listen), BIG)
        said, problem = process.communicate(timeout=60)
        assert process.returncode == 0, problem
        assert said.splitlines()[-1].endswith(sha(BIG)[7:])
    assert [path.name for path in (tmp_path / "store/sha256").iterdir()] == [sha(BIG)[7:]]
    assert served.asked(digest) == [None]
    [waits] = [event.what for event in events if event.phase == "wait"]
    holder = rf"pid {process.pid} on {re.escape(os.uname().nodename)} downloads the layer {digest[:19]} since \d+ s"
    assert re.fullmatch(holder, waits)
    assert os.listdir(leases(tmp_path)) == []


def test_a_process_that_lost_its_lease_writes_nothing_more(served, fetch, tmp_path):
    """As when it was stopped for so long that another process broke its lease."""
    gate = threading.Event()
    digest = served.blob(BIG, faults=[hold(gate)])
    with child(served, tmp_path, BIG) as process:
        wait_for_part(tmp_path, 1_000_000)
        process.send_signal(signal.SIGSTOP)
        [held] = leases(tmp_path).iterdir()
        held.unlink()
        time.sleep(lease.BEAT)
        [path] = fetch(BIG)
        status = path.stat()
        gate.set()
        process.send_signal(signal.SIGCONT)
        said, problem = process.communicate(timeout=60)
        assert process.returncode == 0, problem
    assert "another process took the partial download" in said
    assert whole([path], BIG)
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert served.asked(digest) == [None, "bytes=1000000-"]


def test_an_error_elsewhere_ends_the_waiting(served, fetch, tmp_path):
    gate = threading.Event()
    served.blob(BIG, faults=[hold(gate)])
    served.blob(b"bad", faults=[(418, {}, b"")])
    with child(served, tmp_path, BIG):
        wait_for_part(tmp_path, 1_000_000)
        begin = time.monotonic()
        with pytest.raises(ImageUnavailable, match="status 418"):
            fetch(BIG, b"bad")
        assert time.monotonic() - begin < 5
    gate.set()


def test_a_part_that_is_taken_from_a_running_process_does_not_end_it(served, fetch, tmp_path):
    """As when it was stalled for so long that another machine took its part."""
    gate = threading.Event()
    served.blob(BIG, faults=[hold(gate)])
    with child(served, tmp_path, BIG) as process:
        wait_for_part(tmp_path, 1_000_000)
        for part in parts(tmp_path):
            part.unlink()
        gate.set()
        _, problem = process.communicate(timeout=60)
        assert process.returncode == 0, problem
    assert whole(sorted((tmp_path / "store/sha256").iterdir()), BIG)


# --- no room -------------------------------------------------------------------------------


def test_too_little_space_is_said_before_anything_is_asked(served, tmp_path):
    free = os.statvfs(tmp_path)
    size = min((1 << 40) - 1, free.f_bavail * free.f_frsize + (1 << 33))
    with pytest.raises(FileUnusable, match="has not enough space") as error:
        blobs.fetch_all([BlobSpec(digest=sha(b"x"), size=size)], None, tmp_path, leases=tmp_path)
    assert re.search(r"too little space \([\d.]+ [GT]B needed, .* free\)", error.value.why)


def test_a_disk_that_fills_up_is_named_and_what_came_is_kept(served, fetch, tmp_path):
    digest = served.blob(BIG)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))\n"
    with child(served, tmp_path, BIG, before=limit) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"`{tmp_path}/store/sha256` has not enough space for the image's layers" in said
    assert re.search(r"ulimit -f\) allows \(2.1 MB needed, .* free\)", said)
    served.requests.clear()
    assert whole(fetch(BIG), BIG)
    assert served.asked(digest) == ["bytes=1500000-"]


@pytest.mark.ordinary_user
def test_a_store_that_may_not_be_written(served, fetch, tmp_path):
    (tmp_path / "store").mkdir(mode=0o555)
    with pytest.raises(FileUnusable, match="cannot be used for image layers"):
        fetch(b"x")


def test_a_store_that_is_a_file(served, fetch, tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(FileUnusable, match="cannot be used for image layers"):
        fetch(b"x")


# --- the caller's events -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BrokenPipeError, KeyboardInterrupt, ZeroDivisionError])
def test_what_the_callers_function_raises_comes_out_as_it_is(served, fetch, kind):
    served.blob(BIG)

    def listen(_event):
        raise kind

    with pytest.raises(kind):
        fetch(BIG, on_event=listen)


def test_events_are_few_and_never_at_once(served, fetch):
    def slow(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        for begin in range(0, len(body), 16384):
            handler.wfile.write(body[begin : begin + 16384])
            time.sleep(0.005)

    other = BIG[::-1]
    served.blob(BIG, faults=[slow])
    served.blob(other, faults=[slow])
    inside, events = threading.Lock(), []

    def listen(event):
        assert inside.acquire(blocking=False)
        time.sleep(0.01)
        events.append((time.monotonic(), event))
        inside.release()

    begin = time.monotonic()
    fetch(BIG, other, on_event=listen)
    took = time.monotonic() - begin
    assert 4 <= len(events) <= 2 * (5 * took + 2)
    for digest in (sha(BIG), sha(other)):
        done = [event.done for _, event in events if event.what == digest]
        assert done == sorted(done)
        assert done[-1] == len(BIG)
