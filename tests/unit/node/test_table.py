"""The table of a verdict, as it stands in the job's log and in `hpcenv report`."""

import dataclasses

from hpcenv.node import table
from hpcenv.wire import Finding, NodeVerdict, Rendezvous, Setting, Verdict


def verdict(*findings, nodes=None, **changes):
    results = nodes or {"n1": "match", "n2": "mismatch"}
    base = Verdict(
        schema=1,
        run="r1",
        attempt=0,
        result="mismatch",
        nodes=tuple(NodeVerdict(node=n, result=r, compared=21) for n, r in results.items()),
        findings=findings,
        rendezvous=None,
        settings={},
    )
    return dataclasses.replace(base, **changes)


def finding(field, locked, found, **changes):
    base = Finding(node="n2", field=field, locked=locked, found=found, result="mismatch", severity="must")
    return dataclasses.replace(base, **changes)


def render(given):
    return table.render(given, lockfile="lockfiles/default.lock.toml")


def test_one_table_names_node_field_locked_and_found_value():
    assert render(verdict(finding("torch.version", "2.9.1", "2.9.0"))) == (
        "hpcenv verdict: MISMATCH: 1 of 2 nodes not as lockfiles/default.lock.toml says\n"
        "\n"
        "  n1  match     21 fields compared\n"
        "  n2  MISMATCH  21 fields compared\n"
        "\n"
        "NODE  FIELD          LOCKED  FOUND\n"
        "n2    torch.version  2.9.1   2.9.0\n"
    )


def test_a_match_says_so_and_lists_the_settings_with_reasons():
    same = Setting(name="NCCL_DEBUG", value="WARN", origin="detected", reason="names the cause")
    own = {
        n: Setting(name="GLOO_SOCKET_IFNAME", value=i, origin="detected") for n, i in (("n1", "eth0"), ("n2", "ib0"))
    }
    given = verdict(
        nodes={"n1": "match", "n2": "match"},
        result="match",
        rendezvous=Rendezvous(host="10.0.0.1", port=23456, id="77.0"),
        settings={node: (own[node], same) for node in own},
    )
    assert render(given) == (
        "hpcenv verdict: match: 2 nodes as lockfiles/default.lock.toml says\n"
        "\n"
        "  n1  match     21 fields compared\n"
        "  n2  match     21 fields compared\n"
        "\n"
        "rendezvous 10.0.0.1:23456, id 77.0\n"
        "settings:\n"
        "  GLOO_SOCKET_IFNAME = eth0 on n1  (detected)\n"
        "  GLOO_SOCKET_IFNAME = ib0 on n2  (detected)\n"
        "  NCCL_DEBUG = WARN  (detected; names the cause)\n"
    )
    assert "settings" not in table.render(given, lockfile="l", settings=False)


def test_how_the_sif_was_checked_is_told_per_node():
    given = verdict(nodes={"n1": "match", "n2": "match"})
    words = ("own copy, same file as hashed", "hashed now")
    nodes = [dataclasses.replace(node, sif=how) for node, how in zip(given.nodes, words, strict=True)]
    text = table.render(dataclasses.replace(given, nodes=tuple(nodes)), lockfile="x")
    assert "  n1  match     21 fields compared; SIF: own copy, same file as hashed\n" in text
    assert "  n2  match     21 fields compared; SIF: hashed now\n" in text


def test_a_silent_node_compared_nothing():
    silent = finding("facts", "reported", "this node reported no facts", result="unknown")
    given = verdict(silent, result="unknown")
    given = dataclasses.replace(given, nodes=(given.nodes[0], NodeVerdict(node="n2", result="unknown", compared=0)))
    text = render(given)
    assert text.startswith("hpcenv verdict: UNKNOWN: 1 of 2 nodes could not be read in full\n")
    assert "  n2  UNKNOWN   nothing compared\n" in text


def test_nodes_that_could_not_be_read_are_not_counted_as_different():
    text = render(verdict(nodes={"n1": "unknown", "n2": "mismatch", "n3": "match"}))
    assert text.startswith("hpcenv verdict: MISMATCH: 1 of 3 nodes not as ")


def test_a_later_attempt_is_named():
    assert render(verdict(attempt=2)).startswith("hpcenv verdict, attempt 2: MISMATCH:")


def test_what_does_not_block_stands_apart():
    text = render(verdict(finding("a.b", "1", "2"), finding("host.kernel", "6.1", "6.2", severity="info")))
    assert text.endswith(
        "\n\nalso different, not blocking:\nNODE  FIELD        LOCKED  FOUND\nn2    host.kernel  6.1     6.2\n"
    )


def test_long_values_are_stacked_and_wrapped_at_80_columns():
    text = render(verdict(finding("python.sys-path", "/a/b " * 30, "/c/d " * 30, note="added: /c/d " * 9)))
    assert "node n2  python.sys-path  MISMATCH\n  locked  /a/b /a/b" in text
    assert max(map(len, text.splitlines())) <= 80


def test_digests_are_shortened_and_other_words_are_not():
    assert table.shorten("sha256:" + "0123456789abcdef" * 4) == "sha256:0123456789ab..."
    assert table.shorten("0123456789abcdef0123") == "0123456789abcdef0123"
    assert table.shorten("2.9.1+cu132") == "2.9.1+cu132"


def test_an_empty_value_is_shown_as_one():
    assert table.shorten("") == '""'


def test_control_characters_cannot_reach_the_log():
    nasty = "\x1b[2J\n\t\udcff\u00e9\u202e"
    given = finding("packages." + nasty, nasty, nasty, note=nasty)
    text = render(verdict(given))
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b[2J\n\t\udcff\xe9\u202e" in text


def test_a_verdict_over_no_node_can_be_shown():
    assert table.render(dataclasses.replace(verdict(), nodes=()), lockfile="l").startswith("hpcenv verdict")
