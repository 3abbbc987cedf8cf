"""credentials: found where docker, Apptainer and podman keep them, and never shown."""

import base64
import json
import os
import stat
import traceback

import pytest

from hpcenv.image.registry import credentials
from hpcenv.image.registry.credentials import Credential, find

SECRET = "pw-s3cret"


def basic(user="u", secret=SECRET):
    return base64.b64encode(f"{user}:{secret}".encode()).decode()


class Home:
    """A home folder with credential files and helpers."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {"HOME": str(folder), "PATH": str(folder / "bin")}

    def write(self, place, document):
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def helper(self, name, script):
        """An executable `docker-credential-NAME`; it notes what it was asked for."""
        path = self.folder / "bin" / f"docker-credential-{name}"
        path.parent.mkdir(exist_ok=True)
        note = f'read server; echo "$* $server" >> {self.folder}/asked\n'
        path.write_text(f"#!/bin/sh\n{note}{script}\n")
        path.chmod(0o755)

    def asked(self):
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def find(self, registry="r.example:5000", repository="team/img", **environ):
        return find(registry, repository, {**self.environ, **environ})


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


def says(user="u", secret=SECRET):
    return f"""echo '{json.dumps({"ServerURL": "x", "Username": user, "Secret": secret})}'"""


def auths(**hosts):
    return {"auths": {host: {"auth": basic(user=user)} for host, user in hosts.items()}}


# --- where ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        (".docker/config.json", {}),
        ("elsewhere/config.json", {"DOCKER_CONFIG": "elsewhere"}),
        (".apptainer/docker-config.json", {}),
        ("elsewhere/docker-config.json", {"APPTAINER_CONFIGDIR": "elsewhere"}),
        ("a/b.json", {"APPTAINER_AUTHFILE": "a/b.json"}),
        ("a/b.json", {"REGISTRY_AUTH_FILE": "a/b.json"}),
        ("run/containers/auth.json", {"XDG_RUNTIME_DIR": "run"}),
        (".config/containers/auth.json", {}),
        ("conf/containers/auth.json", {"XDG_CONFIG_HOME": "conf"}),
    ],
)
def test_every_place_is_looked_at(home, place, variables):
    path = home.write(place, {"auths": {"r.example:5000": {"auth": basic()}}})
    environ = {name: str(home.folder / value) for name, value in variables.items()}
    found = home.find(**environ)
    assert found.notes == ()
    assert found.credential == Credential(user="u", secret=SECRET, kind="password", origin=f"{path} (r.example:5000)")
    assert home.find(registry="other.example").credential is None


def test_the_order_of_places(home):
    def users():
        return home.find(**environ).credential.user

    environ = {"XDG_RUNTIME_DIR": str(home.folder / "run")}
    host = "r.example:5000"
    home.write(".config/containers/auth.json", auths(**{host: "config"}))
    assert users() == "config"
    home.write("run/containers/auth.json", auths(**{host: "runtime"}))
    assert users() == "runtime"
    home.write(".docker/config.json", auths(**{host: "docker"}))
    assert users() == "docker"
    home.write(".apptainer/docker-config.json", auths(**{host: "apptainer"}))
    assert users() == "apptainer"
    environ["REGISTRY_AUTH_FILE"] = str(home.write("podman.json", auths(**{host: "named"})))
    assert users() == "named"
    environ["APPTAINER_AUTHFILE"] = str(home.write("app.json", auths(**{host: "authfile"})))
    assert users() == "authfile"
    environ |= {"SINGULARITY_DOCKER_USERNAME": "old", "SINGULARITY_DOCKER_PASSWORD": "p"}
    assert users() == "old"
    environ |= {"APPTAINER_DOCKER_USERNAME": "variable", "APPTAINER_DOCKER_PASSWORD": "p"}
    assert users() == "variable"


def test_half_of_the_variables_is_nothing(home):
    assert home.find(APPTAINER_DOCKER_USERNAME="u").credential is None
    assert home.find(APPTAINER_DOCKER_PASSWORD="p", APPTAINER_DOCKER_USERNAME="").credential is None


@pytest.mark.parametrize(
    "key", ["r.example:5000", "https://r.example:5000", "http://r.example:5000", "https://r.example:5000/v1/",
            "https://r.example:5000/v2/", "r.example:5000/", "r.example:5000/team", "r.example:5000/team/img"],
)  # fmt: skip
def test_the_keys_that_tools_write(home, key):
    home.write(".docker/config.json", auths(**{key: "u"}))
    assert home.find().credential.user == "u"


@pytest.mark.parametrize(
    "key", ["r.example", "r.example:5001", "r.example:5000/tea", "xr.example:5000", "example:5000"]
)
def test_keys_of_others(home, key):
    home.write(".docker/config.json", auths(**{key: "u"}))
    assert home.find().credential is None


def test_the_longest_key_counts(home):
    names = ("r.example:5000", "r.example:5000/team", "r.example:5000/team/img")
    home.write(".config/containers/auth.json", auths(**{name: name for name in names}))
    for repository, expected in (("team/img", names[2]), ("team/other", names[1]), ("x/img", names[0])):
        assert home.find(repository=repository).credential.origin.endswith(f"({expected})")


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io"])
def test_docker_hub_has_many_names(home, key):
    home.write(".docker/config.json", auths(**{key: "hub"}))
    assert home.find(registry="docker.io", repository="library/python").credential.user == "hub"


def test_without_a_home_the_accounts_is_used(monkeypatch, home):
    home.write(".docker/config.json", auths(**{"r.example:5000": "u"}))
    monkeypatch.setattr(credentials.pwd, "getpwuid", lambda uid: type("Entry", (), {"pw_dir": str(home.folder)}))
    assert find("r.example:5000", "a", {}).credential.user == "u"


# --- what ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "user", "kind", "secret"),
    [
        ({"auth": basic("u", "p:w:")}, "u", "password", "p:w:"),
        ({"auth": basic("ü", "ß")}, "ü", "password", "ß"),
        ({"username": "u", "password": "p"}, "u", "password", "p"),
        ({"identitytoken": "refresh"}, "", "identity", "refresh"),
        ({"auth": basic("<token>", "refresh")}, "", "identity", "refresh"),
        ({"auth": basic("00000000", "x"), "identitytoken": "refresh"}, "", "identity", "refresh"),
        ({"registrytoken": "bearer"}, "", "bearer", "bearer"),
    ],
)
def test_kinds(home, entry, user, kind, secret):
    home.write(".docker/config.json", {"auths": {"r.example:5000": entry}})
    found = home.find().credential
    assert (found.user, found.kind, found.secret) == (user, kind, secret)


def test_the_header_of_a_password():
    assert Credential(user="u", secret="p", kind="password", origin="").basic() == "Basic " + basic("u", "p")


@pytest.mark.parametrize(
    "entry", [{}, None, 7, [], {"auth": 7}, {"auth": ""}, {"auth": basic("", "p")}, {"auth": basic("u", "")}, {"email": "x"}]
)  # fmt: skip
def test_entries_that_say_nothing(home, entry):
    home.write(".docker/config.json", {"auths": {"r.example:5000": entry}})
    assert home.find() == credentials.Search(credential=None)


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "", "\xff", '{"auths": []}', '{"auths": null}', '{"credHelpers": 3}', "[" * 100000,
             '{"auths": {"r.example:5000": {"auth": "%%%"}}}', '{"credsStore": ["x"]}', '{"credsStore": "../../bin/sh"}',
             '{"credHelpers": {"r.example:5000": "a b"}}'],
)  # fmt: skip
def test_damaged_files_do_not_hide_the_next_one(home, text):
    home.write(".apptainer/docker-config.json", text)
    home.write(".docker/config.json", auths(**{"r.example:5000": "next"}))
    found = home.find()
    assert found.credential.user == "next"
    silent = ('{"auths": []}', '{"auths": null}', '{"credHelpers": 3}')
    assert [".apptainer/docker-config.json" in note for note in found.notes] == ([] if text in silent else [True])


def test_files_that_are_none(home):
    (home.folder / ".apptainer/docker-config.json").mkdir(parents=True)
    (home.folder / ".docker").mkdir()
    os.mkfifo(home.folder / ".docker/config.json")
    large = home.write("large.json", " " * (1 << 20) + "{}")
    found = home.find(REGISTRY_AUTH_FILE=str(large), APPTAINER_AUTHFILE="\0")
    assert found.credential is None
    assert len(found.notes) == 4


# --- helpers -------------------------------------------------------------------------------


def test_a_helper_of_the_registry_comes_before_the_general_one_and_before_the_file(home):
    document = {**auths(**{"r.example:5000": "file"}), "credsStore": "all", "credHelpers": {"r.example:5000": "own"}}
    home.write(".docker/config.json", document)
    home.helper("own", says("own"))
    home.helper("all", says("all"))
    found = home.find().credential
    assert (found.user, found.kind, found.secret) == ("own", "password", SECRET)
    assert found.origin.startswith("docker-credential-own (named in ")
    assert home.asked() == ["get r.example:5000"]
    home.helper("own", "echo 'credentials not found in native keychain'; exit 1")
    assert home.find().credential.user == "all"
    home.helper("all", "echo 'credentials not found in native keychain'; exit 1")
    found = home.find()
    assert (found.credential.user, found.notes) == ("file", ())


def test_a_helper_is_asked_for_docker_hub_by_its_url(home):
    home.write(".docker/config.json", {"credsStore": "all"})
    home.helper("all", says())
    assert home.find(registry="docker.io").credential.user == "u"
    assert home.asked() == ["get https://index.docker.io/v1/"]


def test_a_helper_gives_an_identity_token(home):
    home.write(".docker/config.json", {"credsStore": "all"})
    home.helper("all", says("<token>", "refresh"))
    found = home.find().credential
    assert (found.user, found.kind, found.secret) == ("", "identity", "refresh")


def test_a_helper_gets_the_users_environment(home):
    home.write(".docker/config.json", {"credsStore": "all"})
    home.helper("all", 'echo "{\\"Username\\": \\"$WHO\\", \\"Secret\\": \\"x\\"}"')
    assert home.find(WHO="alice").credential.user == "alice"


@pytest.mark.parametrize(
    "script",
    [
        f"echo {SECRET}; echo {SECRET} >&2; exit 1",
        f"echo {SECRET}; kill -9 $$",
        f"echo '{SECRET}'",
        f"""echo '{{"Username": "u", "Secret": ["{SECRET}"]}}'""",
        f"""echo '["{SECRET}"]'""",
        "true",
    ],
)
def test_a_failing_helper_is_noted_without_its_words(home, script):
    home.write(".docker/config.json", {"credsStore": "bad"})
    home.helper("bad", script)
    found = home.find()
    assert found.credential is None
    [note] = found.notes
    assert "`docker-credential-bad`" in note
    assert SECRET not in note


def test_a_helper_that_is_not_there_or_hangs(home, monkeypatch):
    home.write(".docker/config.json", {"credsStore": "absent", "credHelpers": {"r.example:5000": "slow"}})
    home.helper("slow", "exec sleep 20")
    monkeypatch.setattr(credentials, "_HELPER_SECONDS", 0.3)
    environ = {"PATH": f"{home.folder}/bin:/usr/bin:/bin"}
    slow, absent = home.find(**environ).notes
    assert "did not answer within 0.3 s" in slow
    assert "`docker-credential-absent` is not on PATH" in absent


# --- never shown ---------------------------------------------------------------------------


def test_a_credential_does_not_show_its_secret(home):
    home.write(".docker/config.json", auths(**{"r.example:5000": "u"}))
    search = home.find()
    shown = [repr(search), str(search), f"{search.credential}", repr(search.credential), f"{vars(search)!r}"]
    try:
        raise ValueError(search)
    except ValueError:
        shown.append(traceback.format_exc())
    for text in shown:
        assert SECRET not in text
        assert basic() not in text
    assert str(search.credential) == f"the password of u from {home.folder}/.docker/config.json (r.example:5000)"


def test_nothing_is_written(home):
    home.write(".docker/config.json", auths(**{"r.example:5000": "u"}))
    before = {path: path.stat().st_mtime_ns for path in home.folder.rglob("*")}
    home.find()
    assert {path: path.stat().st_mtime_ns for path in home.folder.rglob("*")} == before
    assert all(stat.S_IMODE(path.stat().st_mode) for path in before)
