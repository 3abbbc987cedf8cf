"""The table of a verdict, as it stands in the job's log and in `hpcenv report`."""

import dataclasses
import functools

from hpcenv.judge import verdict_table
from hpcenv.records.checks import PreflightSummary
from hpcenv.records.manifest import Setting
from hpcenv.records.network import NetworkDecision, NetworkWarning, StepOption
from hpcenv.records.verdict import Finding, NodeVerdict, Rendezvous, Verdict


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
    return verdict_table.render(given, lockfile="lockfiles/default.lock.toml")


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
        "  n[1-2]  match     21 fields compared\n"
        "\n"
        "rendezvous 10.0.0.1:23456, id 77.0\n"
        "settings:\n"
        "  GLOO_SOCKET_IFNAME = eth0 on n1  (detected)\n"
        "  GLOO_SOCKET_IFNAME = ib0 on n2  (detected)\n"
        "  NCCL_DEBUG = WARN  (detected; names the cause)\n"
    )
    assert "settings" not in verdict_table.render(given, lockfile="l", settings=False)


def test_what_is_wrong_with_the_network_follows_the_settings():
    decision = NetworkDecision(
        profile="slingshot", why="4 adapters",
        warnings=(NetworkWarning(rule="ports.differ", what="3 ports", todo="tell support", nodes=("n2",)),),
        step_options=(StepOption(option="--network=disable_rdzv_get", reason="HPE requires it", rule="r"),),
    )  # fmt: skip
    given = verdict(
        nodes={"n1": "match", "n2": "match"},
        result="match",
        rendezvous=Rendezvous(host="10.0.0.1", port=23456, id="77.0"),
        settings={"n1": (), "n2": ()},
        network=decision,
    )
    assert render(given).endswith(
        "\n\nnetwork: slingshot (4 adapters)\n"
        "  warning: 3 ports on n2; do: tell support\n"
        "  missing: srun --network=disable_rdzv_get: HPE requires it; put it into [srun]\n"
    )


def test_how_the_sif_was_checked_is_told_per_node():
    given = verdict(nodes={"n1": "match", "n2": "match"})
    words = ("own copy, same file as hashed", "hashed now")
    nodes = [dataclasses.replace(node, sif=how) for node, how in zip(given.nodes, words, strict=True)]
    text = verdict_table.render(dataclasses.replace(given, nodes=tuple(nodes)), lockfile="x")
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
    assert verdict_table.shorten("sha256:" + "0123456789abcdef" * 4) == "sha256:0123456789ab..."
    assert verdict_table.shorten("0123456789abcdef0123") == "0123456789abcdef0123"
    assert verdict_table.shorten("2.9.1+cu132") == "2.9.1+cu132"


def test_an_empty_value_is_shown_as_one():
    assert verdict_table.shorten("") == '""'


def test_control_characters_cannot_reach_the_log():
    nasty = "\x1b[2J\n\t\udcff\u00e9\u202e"
    given = finding("packages." + nasty, nasty, nasty, note=nasty)
    text = render(verdict(given))
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b[2J\n\t\udcff\xe9\u202e" in text


def test_a_verdict_over_no_node_can_be_shown():
    assert verdict_table.render(dataclasses.replace(verdict(), nodes=()), lockfile="l").startswith("hpcenv verdict")


def many(count, **other):
    """A verdict of so many nodes that match, but for those named."""
    return {f"n{number}": other.get(f"n{number}", "match") for number in range(1, count + 1)}


def test_many_equal_nodes_are_one_line():
    text = render(verdict(nodes=many(500), result="match"))
    assert text.splitlines()[2:] == ["  n[1-500]  match     21 fields compared"]


def test_one_different_node_of_many_fits_on_a_screen():
    rows = [finding(f"libs.x{number}.version", "1", "2", node="n17") for number in range(5)]
    text = render(verdict(*rows, nodes=many(64, n17="mismatch")))
    assert "  n[1-16,18-64]  match     21 fields compared\n" in text
    assert "  n17            MISMATCH  21 fields compared\n" in text
    assert text.count("\nn17 ") == 5
    assert len(text.splitlines()) < 24


def test_the_same_difference_on_many_nodes_is_one_row():
    rows = [finding("torch.version", "2", "3", node=f"n{number}") for number in (1, 2, 3, 7)]
    text = render(verdict(*rows, nodes=dict.fromkeys(("n1", "n2", "n3", "n7"), "mismatch")))
    assert text.endswith("NODE      FIELD          LOCKED  FOUND\nn[1-3,7]  torch.version  2       3\n")


def test_a_field_with_another_value_on_every_node_does_not_bury_the_others():
    rows = [finding("host.driver-version", "1", f"2.{number}", node=f"n{number}") for number in range(1, 101)]
    text = render(
        verdict(*rows, finding("torch.version", "2", "3", node="n1"), nodes=dict.fromkeys(many(100), "mismatch"))
    )
    assert "and host.driver-version on 92 more; verdict.json has all" in text
    assert "\nn1    torch.version        2       3\n" in text
    assert len(text.splitlines()) < 24


def test_many_fields_that_are_unknown_for_one_reason_are_told_together():
    hidden = [
        finding(f"gpu.{name}", "none", "GPU 0: GPU is lost", result="unknown", owner="node", remedy="tell the support")
        for name in ("fabric", "stray", "retired")
    ]
    other = finding("host.os", "debian 12", "no /etc/os-release", result="unknown")
    text = render(verdict(*hidden, other, result="unknown"))
    assert text.count("GPU is lost") == text.count("tell the support") == 1
    assert "node n2  UNKNOWN, 3 fields for one reason\n  fields  gpu.fabric, gpu.stray, gpu.retired\n" in text
    assert "host.os" in text


def test_a_check_that_this_machine_cannot_do_leaves_the_verdict_in_one_line():
    # As an ordinary user on a machine with an H200: kernel.dmesg_restrict closes the kernel's log.
    closed = {"locked": "none", "result": "unknown", "severity": "info", "owner": "node", "remedy": "tell the support"}
    unread = finding("gpu.xid", found="/dev/kmsg: Operation not permitted", **closed)
    given = verdict(
        unread,
        nodes={"n1": "match", "n2": "match"},
        result="match",
        preflight=PreflightSummary(level="quick", fine=("gpu.count", "gpu.lost"), unknown=("gpu.xid",)),
    )
    line = verdict_table.brief(given, lockfile="default.lock.toml")
    assert line == "hpcenv verdict: match: 2 nodes, 21 fields, 2 checks, not read here: gpu.xid; 0\n  settings"
    assert "Operation not permitted" in render(given)
    assert "tell the support" not in render(given), "nothing is known to be broken"
    must = dataclasses.replace(unread, severity="must")
    assert "Operation not permitted" in verdict_table.brief(verdict(must), lockfile="default.lock.toml")


def test_names_that_make_no_range_are_cut_with_their_number():
    odd = {f"n{2 * number}": "match" for number in range(100)}
    (line,) = [line for line in render(verdict(nodes=odd, result="match")).splitlines() if " match " in line]
    assert line.startswith("  n[0,2,4,")
    assert "... (100 nodes)  match " in line


def _well(**changes):
    same = Setting(name="NCCL_DEBUG", value="WARN", origin="detected")
    own = Setting(name="GLOO_SOCKET_IFNAME", value="eth0", origin="detected")
    preflight = PreflightSummary(
        level="quick", fine=("sys.nofile", "net.reach"), not_run={"ib.rate": "no RDMA adapter"}
    )
    values = {"nodes": {"n1": "match", "n2": "match"}, "result": "match", "preflight": preflight}
    return verdict(**{**values, "settings": {"n1": (same, own), "n2": (same,)}, **changes})


def test_where_all_is_well_the_log_has_one_line():
    brief = functools.partial(verdict_table.brief, lockfile="l.toml")
    assert brief(_well()) == "hpcenv verdict: match: 2 nodes, 21 fields, 2 checks; 2 settings"
    assert brief(_well(preflight=None, attempt=3)) == "hpcenv verdict, attempt 3: match: 2 nodes, 21 fields; 2 settings"
    other = (NodeVerdict(node="n1", result="match", compared=1), NodeVerdict(node="n2", result="match", compared=20))
    assert "match: 2 nodes, 1 to 20 fields, 2 checks;" in brief(dataclasses.replace(_well(), nodes=other))
    noted = brief(_well(notes=("GPUs: not tried",)))
    assert noted == "hpcenv verdict: match: 2 nodes, 21 fields, 2 checks; 2 settings\nGPUs: not tried"


def test_where_something_differs_the_log_has_the_table_without_settings():
    warned = finding("host.kernel", "5", "6", severity="info", result="mismatch")
    network = NetworkDecision(
        profile="ethernet",
        why="no RDMA",
        warnings=(NetworkWarning(rule="r", what="two routes", todo="name one", nodes=("n1",)),),
    )
    skipped = PreflightSummary(level="quick", skipped=("net.reach",))
    for given, says in (
        (_well(findings=(warned,)), "host.kernel"),
        (_well(network=network), "two routes"),
        (_well(preflight=skipped), "skipped (--skip-check): net.reach"),
        (_well(launched=("n1",)), "1 of 2 nodes train"),
    ):
        text = verdict_table.brief(given, lockfile="l.toml")
        assert text == verdict_table.render(given, lockfile="l.toml", settings=False)
        assert says in text
