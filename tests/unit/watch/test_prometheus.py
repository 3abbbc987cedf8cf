"""Text files for node_exporter, read by Debian's Prometheus where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from hpcenv.records.samples import GpuUse, NodeUse, RankUse, Sample
from hpcenv.watch.prometheus import lines, publish, withdraw

DOCS = Path(__file__).parents[3] / "docs/how-to/watch"
LABELS = {"job_id": "42_1", "node": "n1", "run": 'a"b\\'}
SAMPLE = Sample(
    at=1000.0,
    seconds=10.0,
    gpus=(
        GpuUse(
            index=0,
            uuid="GPU-1",
            use=31.0,
            memory=2.0 * 2**20,
            memory_total=5.0 * 2**20,
            energy=2.5,
            sm=50.0,
            ranks=(3,),
        ),
        GpuUse(index=1, uuid="GPU-2", slow=("heat",)),
    ),
    node=NodeUse(cpu=1.5, cpus=16),
    ranks=(RankUse(rank=3, pid=1, step=7, step_seconds=2.0, wait_seconds=1.5, last_step=990.0),),
)
needs_prometheus = pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed here")


def values(sample=SAMPLE):
    found = (line.rpartition(" ") for line in lines(sample, LABELS) if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


def test_values_have_the_names_and_units_of_dcgm_exporter():
    own = 'job_id="42_1",node="n1",run="a\\"b\\\\",gpu="0",UUID="GPU-1"'
    found = values()
    assert found[f"DCGM_FI_DEV_GPU_UTIL{{{own}}}"] == 31.0
    assert found[f"DCGM_FI_DEV_FB_USED{{{own}}}"] == 2.0
    assert found[f"DCGM_FI_DEV_FB_FREE{{{own}}}"] == 3.0
    assert found[f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{own}}}"] == 2500.0
    assert found[f"DCGM_FI_PROF_SM_ACTIVE{{{own}}}"] == 0.5


def test_an_unknown_value_has_no_line():
    text = "\n".join(lines(SAMPLE, LABELS))
    assert text.count("DCGM_FI_DEV_GPU_UTIL{") == 1
    assert "DCGM_FI_DEV_GPU_TEMP" not in text
    assert "hpcenv_node_memory" not in text


def test_the_file_is_readable_for_all_and_named_by_job_and_node(tmp_path):
    before = os.umask(0o077)
    try:
        publish(SAMPLE, tmp_path, LABELS)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "hpcenv-42_1-n1.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    publish(SAMPLE, tmp_path, {**LABELS, "job_id": "../../x"})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["hpcenv-.._.._x-n1.prom", path.name]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path):
    publish(SAMPLE, tmp_path, LABELS)
    (path,) = tmp_path.iterdir()
    with path.open() as old:
        publish(Sample(at=2000.0, seconds=10.0), tmp_path, LABELS)
        assert "31.0" in old.read()
    assert "31.0" not in path.read_text()


def test_a_link_of_somebody_else_is_not_written_through(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hpcenv-42_1-n1.prom.part").symlink_to(target)
    publish(SAMPLE, tmp_path / "folder", LABELS)
    assert target.read_text() == "mine"


def test_the_file_is_gone_after_the_run(tmp_path):
    publish(SAMPLE, tmp_path, LABELS)
    withdraw(tmp_path, LABELS)
    withdraw(tmp_path, LABELS)
    assert list(tmp_path.iterdir()) == []


@needs_prometheus
def test_promtool_reads_it():
    text = "".join(f"{line}\n" for line in lines(SAMPLE, LABELS))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    # It asks for names in lower case; these are dcgm-exporter's.
    ours = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("DCGM_")]
    assert ours == []
    assert "error" not in done.stderr


@needs_prometheus
def test_alerts_fire_on_what_they_say_and_on_nothing_else(tmp_path):
    shutil.copy(DOCS / "alerts.yml", tmp_path)
    (tmp_path / "tests.yml").write_text(RULES_TEST)
    done = subprocess.run(["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


SERIES = """
      - {series: 'DCGM_FI_DEV_GPU_UTIL{run="a",job_id="1",node="n1",gpu="0"}', values: '%(use)sx100'}
      - {series: 'hpcenv_gpu_ranks{run="a",job_id="1",node="n1",gpu="0"}', values: '%(ranks)sx100'}
      - {series: 'hpcenv_gpu_slowed{run="a",job_id="1",node="n1",gpu="0"}', values: '%(slowed)sx100'}
      - {series: 'hpcenv_rank_wait_seconds{run="a",job_id="1",node="n1",rank="3"}', values: '%(wait)sx100'}
      - {series: 'hpcenv_rank_step_seconds{run="a",job_id="1",node="n1",rank="3"}', values: '1x100'}
      - {series: 'hpcenv_sample_timestamp_seconds{run="a",job_id="1",node="n1"}', values: '0+60x100'}
      - {series: 'hpcenv_rank_last_step_timestamp_seconds{run="a",job_id="1",node="n1",rank="3"}', values: '%(last)sx100'}
      - {series: 'hpcenv_rank_saving{run="a",job_id="1",node="n1",rank="3"}', values: '%(saving)sx100'}
      - {series: 'hpcenv_node_memory_bytes{run="a",job_id="1",node="n1"}', values: '%(memory)sx100'}
      - {series: 'hpcenv_node_memory_limit_bytes{run="a",job_id="1",node="n1"}', values: '100x100'}
"""
HEALTHY = {"use": 90, "ranks": 1, "slowed": 0, "wait": 0.1, "last": "0+60", "saving": 0, "memory": 50}
SICK = {"use": 0, "ranks": 0, "slowed": 1, "wait": 0.9, "last": "0", "saving": 0, "memory": 99}
ALERTS = ("GpuIdle", "GpuWithoutProcess", "GpuSlowed", "RankWaitsForData", "RankMakesNoStep", "MemoryNearItsLimit")


def rules_test(of, fire):
    expected = "".join(
        f'      - {{expr: \'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)\', eval_time: 80m, '
        f"exp_samples: [{{labels: '{{}}', value: {int(name in fire)}}}]}}\n"
        for name in ALERTS
    )
    return f"  - interval: 1m\n    input_series:{SERIES % of}    promql_expr_test:\n{expected}"


RULES_TEST = "rule_files: [alerts.yml]\nevaluation_interval: 1m\ntests:\n" + "".join(
    (
        rules_test(HEALTHY, ()),
        rules_test(SICK, ALERTS),
        rules_test({**SICK, "saving": 1}, set(ALERTS) - {"RankMakesNoStep"}),
    )
)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def query(port, expression):
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)["data"]["result"]


@needs_prometheus
@pytest.mark.skipif(shutil.which("prometheus-node-exporter") is None, reason="node_exporter is not installed here")
def test_a_real_scrape_and_the_expressions_of_the_dashboard(tmp_path):
    (tmp_path / "text").mkdir()
    publish(SAMPLE, tmp_path / "text", {**LABELS, "run": "a"})
    exporter, port = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "n", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    programs = [
        ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{exporter}", "--collector.disable-defaults",
         "--collector.textfile", f"--collector.textfile.directory={tmp_path}/text"],
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
    ]  # fmt: skip
    running = [subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for one in programs]
    try:
        found = []
        for _ in range(60):
            time.sleep(0.5)
            try:
                found = query(port, 'DCGM_FI_DEV_GPU_UTIL{run="a"}')
            except OSError:
                continue
            if found:
                break
        assert [(one["metric"]["gpu"], one["value"][1]) for one in found] == [("0", "31")]
        panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
        for expression in (target["expr"] for panel in panels for target in panel["targets"]):
            wanted = "POWER" not in expression
            assert bool(query(port, expression.replace("$run", "a"))) == wanted, expression
        assert query(port, "node_textfile_scrape_error")[0]["value"][1] == "0"
    finally:
        for one in running:
            one.terminate()
            one.wait(10)
