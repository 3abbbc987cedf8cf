"""`--export DIR --format ...`: the same training for another engine, with the check in front."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import exports_world
import pytest
import yaml
from exports_world import IMAGE, name_image
from lock_world import edit_lockfile

from hpcenv.exports.archive import LARGEST, check_archive
from hpcenv.exports.export import ENGINES

ROOT = Path(__file__).parents[3]
SCHEMAS = ROOT / "tests" / "engine_schemas"
WORDS = ("--nodes", "2", "--gpus", "0", "--nproc", "2", "--cpus", "4", "--mem", "6G")
ARGS = ("--lr", "3e-4", "it's $HOME ${A} $(B) 100%", "yes")


@pytest.fixture
def project(project: Path) -> Path:
    name_image(project)
    return project


def export(
    hpcenv: Any, project: Path, engine: str, *words: str, status: int = 0, args: tuple[str, ...] = ARGS
) -> tuple[Path, Any]:
    folder = project.parent / engine
    command = ("submit", "train.py", *WORDS, *words, "--export", str(folder), "--format", engine, "--", *args)
    done = hpcenv(*command, cwd=project)
    assert done.status == status, done.stderr
    return folder, done


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def job_of(folder: Path) -> dict[str, Any]:
    return next(one for one in documents(folder / "kubernetes.yaml") if one["kind"] == "Job")


# -- what each engine starts --------------------------------------------------------------


def started(folder: Path, engine: str) -> list[list[str]]:
    """Return what each container starts first, as the engine reads it."""
    if engine == "compose":
        services = documents(folder / "compose.yaml")[0]["services"].values()
        return [[word.replace("$$", "$") for word in (*one["entrypoint"], *one["command"])] for one in services]
    if engine == "skypilot":
        line = documents(folder / "task.yaml")[0]["run"].splitlines()[-1]
        assert line.startswith("exec ")
        return [shlex.split(line.removeprefix("exec "))]
    if engine == "kubernetes":
        pods = [job_of(folder)["spec"]["template"]["spec"]]
    else:
        runtime = documents(folder / "trainjob.yaml")[0]
        pods = [
            one["template"]["spec"]["template"]["spec"] for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        ]
    assert all("initContainers" not in pod and len(pod["containers"]) == 1 for pod in pods)
    containers = [pod["containers"][0] for pod in pods]
    return [[word.replace("$$", "$") for word in (*one["command"], *one["args"])] for one in containers]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_check_is_the_first_program_and_the_arguments_arrive_as_typed(
    project: Path, hpcenv: Any, engine: str
) -> None:
    folder, _ = export(hpcenv, project, engine)
    commands = started(folder, engine)
    assert len(commands) == (2 if engine == "compose" else 1)
    for command in commands:
        assert command[1:5] == ["-I", "/hpcenv/check/check.pyz", "/hpcenv/lock/lock.json", "--"]
        assert command[5:10] == [command[0], "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        assert tuple(command[-5:]) == ("train.py", *ARGS)
    assert (folder / "code" / "source" / "train.py").read_text() == (project / "train.py").read_text()
    assert (folder / "lock" / "lock.toml").read_bytes() == (project / "lockfiles/default.lock.toml").read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_image_by_digest_fingerprint_and_what_is_lost(project: Path, hpcenv: Any, engine: str) -> None:
    folder, done = export(hpcenv, project, engine, "--time", "2h", "--stage")
    text = next(path for path in folder.glob("*.yaml") if path.name != "configmaps.yaml").read_text()
    assert IMAGE in text
    assert "train:v1" not in text
    fingerprint = json.loads((folder / "lock" / "lock.json").read_text())["fingerprint"]
    assert f"hpcenv{'-' if engine == 'skypilot' else '.'}fingerprint: {fingerprint}" in text
    # A sentence on the screen and in the file.
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    said = [line.removeprefix("not there: ") for line in done.stderr.splitlines() if line.startswith("not there: ")]
    assert len(said) > 4
    for sentence in said:
        assert " ".join(sentence.split()) in comment
    for words in ("not compared with each other", "InfiniBand", "(--time)", "stage = True", "ulimits"):
        assert words in comment or (engine == "compose" and words == "ulimits"), words
    assert done.stdout.startswith(f"wrote {folder}: 2 nodes x no GPU, 2 ranks each = 4 ranks")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_older_yaml_and_a_newer_one_read_the_same_text(project: Path, hpcenv: Any, engine: str) -> None:
    """In YAML 1.2, `3e-4` is a number; in YAML 1.1 `yes` is true."""
    folder, _ = export(hpcenv, project, engine)
    for path in folder.glob("*.yaml"):
        for word in ("3e-4", "yes"):
            assert not [line for line in path.read_text().splitlines() if line.lstrip(" -") == word]
        assert "&id" not in path.read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_secret_is_in_the_folder(project: Path, hpcenv: Any, engine: str, tmp_path: Path) -> None:
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write('[env]\nWANDB_API_KEY = "hush-1"\nOMP_NUM_THREADS = "2"\n')
    (project.parent / "token").write_text("hush-2")
    words = ("--env", "MY_TOKEN=hush-3", "--secret", f"HF_TOKEN=file:{project.parent}/token", "--frozen")
    folder, done = export(hpcenv, project, engine, *words)
    for path in folder.rglob("*"):
        # The copy of the code has hpcenv.toml as it is.
        if path.is_file() and "code" not in path.parts and path.name != "configmaps.yaml":
            assert b"hush" not in path.read_bytes(), path
    text = next(path for path in folder.glob("*.yaml") if path.name != "configmaps.yaml").read_text()
    for name in ("WANDB_API_KEY", "MY_TOKEN", "HF_TOKEN", "OMP_NUM_THREADS"):
        assert name in text
    assert "HF_TOKEN" in done.stderr


def test_resources_of_compose(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "compose", "--gpus", "2", "--allow-cpu-torch")
    one, two = documents(folder / "compose.yaml")[0]["services"].values()
    assert one["deploy"]["resources"]["limits"] == {"cpus": "4", "memory": "6144m"}
    assert [s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for s in (one, two)] == [
        ["0", "1"],
        ["2", "3"],
    ]
    assert (one["shm_size"], one["hostname"], one["restart"]) == ("6144m", "node0", "no")
    assert one["ulimits"]["memlock"] == -1


def test_a_pod_that_is_not_the_locked_one_is_not_tried_again(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "kubernetes", "--gpus", "2", "--allow-cpu-torch")
    spec = job_of(folder)["spec"]
    rule = spec["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [90, 91])
    (container,) = spec["template"]["spec"]["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["backoffLimit"] > 0
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "6144Mi", "nvidia.com/gpu": "2"}
    service = documents(folder / "kubernetes.yaml")[0]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert "--rdzv-endpoint=kubernetes-0.kubernetes:29500" in container["args"]


def test_a_trainjob_whose_pod_is_not_the_locked_one_is_not_tried_again(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "trainjob")
    (runtime,) = (one for one in documents(folder / "trainjob.yaml") if one["kind"] == "TrainingRuntime")
    job_set = runtime["spec"]["template"]["spec"]
    (rule,) = job_set["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (replicated,) = job_set["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    first = replicated["template"]["spec"]["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [90, 91])


def test_one_node_needs_no_other(project: Path, hpcenv: Any) -> None:
    for engine in ENGINES:
        folder, _ = export(hpcenv, project, engine, "--nodes", "1")
        (command,) = started(folder, engine)
        assert "--standalone" in command
        assert not [word for word in command if word.startswith("--rdzv")]


def test_skypilot_gets_gpus_by_name(project: Path, hpcenv: Any) -> None:
    words = ("--gpus", "8", "--allow-cpu-torch")
    _, done = export(hpcenv, project, "skypilot", *words, status=2)
    assert "--gpu-type" in done.stderr
    assert not (project.parent / "skypilot").exists(), "nothing is left"
    folder, _ = export(hpcenv, project, "skypilot", *words, "--gpu-type", "h100")
    assert documents(folder / "task.yaml")[0]["resources"] == {
        "image_id": f"docker:{IMAGE}",
        "labels": {"hpcenv-fingerprint": json.loads((folder / "lock/lock.json").read_text())["fingerprint"]},
        "accelerators": "H100:8",
        "cpus": "4+",
        "memory": "6+",
    }


def test_data_become_volumes_and_are_compared_by_content(project: Path, hpcenv: Any) -> None:
    (project.parent / "words").mkdir()
    (project.parent / "words" / "a.bin").write_bytes(b"\0")
    with open(project / "hpcenv.toml", "a", encoding="utf-8") as file:
        file.write(f'[[data]]\npath = "{project.parent}/words"\ncompare = "sha256"\n')
    folder, done = export(hpcenv, project, "compose", "--frozen")
    compose = documents(folder / "compose.yaml")[0]
    assert compose["volumes"] == {"words": {"external": True}}
    assert compose["services"]["node0"]["volumes"][-1] == f"words:{project.parent}/words:ro"
    assert "docker volume create" in done.stderr
    assert [one["name"] for one in json.loads((folder / "lock/lock.json").read_text())["data"]] == ["words"]
    folder, _ = export(hpcenv, project, "kubernetes", "--frozen")
    volumes = job_of(folder)["spec"]["template"]["spec"]["volumes"]
    assert volumes[-1]["persistentVolumeClaim"] == {"claimName": "data-words", "readOnly": True}


# -- ConfigMaps ---------------------------------------------------------------------------


def test_check_lock_and_code_travel_in_config_maps(project: Path, hpcenv: Any) -> None:
    (project / "lib").mkdir()
    (project / "lib" / "helper.py").write_text("VALUE = 1\n")
    folder, _ = export(hpcenv, project, "kubernetes")
    maps = {one["metadata"]["name"]: one for one in documents(folder / "configmaps.yaml")}
    assert set(maps) == {"kubernetes-check", "kubernetes-lock", "kubernetes-code"}
    volumes = {one["name"]: one for one in job_of(folder)["spec"]["template"]["spec"]["volumes"]}
    items = {one["path"]: one["key"] for one in volumes["code"]["configMap"]["items"]}
    assert maps["kubernetes-code"]["data"][items["source/lib/helper.py"]] == "VALUE = 1\n"
    assert set(maps["kubernetes-check"]["binaryData"]) == {"check.pyz"}


@pytest.mark.parametrize("engine", ["kubernetes", "trainjob"])
def test_code_above_a_mebibyte_needs_a_claim(project: Path, hpcenv: Any, engine: str) -> None:
    (project / "table.py").write_text("# " + "x" * (1 << 20))
    folder, done = export(hpcenv, project, engine, status=2)
    assert "1 MiB in a ConfigMap" in done.stderr
    assert "--volume CLAIM:/path" in done.stderr
    assert not folder.exists()
    folder, done = export(hpcenv, project, engine, "--volume", "team:/team")
    assert "kubectl cp code/. POD:/team" in done.stderr
    text = (folder / f"{engine}.yaml").read_text()
    assert "claimName: team" in text
    assert "workingDir: /team/source" in text
    assert len(documents(folder / "configmaps.yaml")) == 2


def test_a_claim_is_for_kubernetes(project: Path, hpcenv: Any) -> None:
    for engine, volume in (("compose", "team:/team"), ("kubernetes", "team"), ("slurm", "team:/team")):
        export(hpcenv, project, engine, "--volume", volume, status=2)
    assert hpcenv("submit", "train.py", "--nproc", "1", "--format", "compose", cwd=project).status == 2


@pytest.mark.parametrize(
    "volume",
    [
        "team:/",
        "Team_X:/team",
        "team:/team/../x",
        "team:/hpcenv/check",
        "team:/hpcenv",
        f"{'a' * 254}:/team",
        "team://hpcenv/check",
        "a..b:/team",
        "team:/a:b",
    ],
)
def test_a_claim_that_kubernetes_would_refuse_or_misplace_is_refused(project: Path, hpcenv: Any, volume: str) -> None:
    folder, done = export(hpcenv, project, "kubernetes", "--volume", volume, status=2)
    assert "cannot be used" in done.stderr
    assert "hint: for example --volume team:/team" in done.stderr
    assert not folder.exists()


@pytest.mark.parametrize("engine", ["kubernetes", "trainjob"])
def test_a_link_to_a_folder_does_not_get_lost(project: Path, hpcenv: Any, engine: str) -> None:
    (project / "conf_real").mkdir()
    (project / "conf_real" / "a.yaml").write_text("lr: 1\n")
    (project / "conf").symlink_to("conf_real")
    folder, done = export(hpcenv, project, engine, status=2)
    assert "`conf` is a symbolic link that a ConfigMap cannot hold" in done.stderr
    assert not folder.exists()
    folder, done = export(hpcenv, project, engine, "--volume", "team:/team")
    assert (folder / "code" / "source" / "conf" / "a.yaml").read_text() == "lr: 1\n"


def test_cpus_near_the_gpus_are_named_as_lost(project: Path, hpcenv: Any) -> None:
    lost = "the ranks are not bound to the CPUs near their GPUs"
    assert lost not in export(hpcenv, project, "compose")[1].stderr
    given = ("--gpus", "2", "--allow-cpu-torch")
    assert lost in " ".join(export(hpcenv, project, "kubernetes", *given)[1].stderr.split())


# -- what cannot be exported --------------------------------------------------------------


def test_an_image_in_no_registry_is_refused_with_the_line_that_pushes_it(project: Path, hpcenv: Any) -> None:
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace(exports_world.REFERENCE, 'host"\n#"'))
    name_image(project, "oci:images/train:v1")
    _, done = export(hpcenv, project, "compose", "--frozen", status=2)
    assert "skopeo copy oci:images/train:v1 docker://HOST/NAME:TAG" in done.stderr


def test_what_no_engine_starts_is_refused(project: Path, hpcenv: Any) -> None:
    export(hpcenv, project, "compose", "--launcher", "srun", status=2)
    export(hpcenv, project, "compose", "--workdir", "live", status=2)
    export(hpcenv, project, "compose", "--chain", "2", status=2)
    overlay = {"form": "squashfs", "use": "packages", "target": "/opt/more", "sha256": "d" * 64, "size": 1}
    name_image(project, overlay=overlay)
    _, done = export(hpcenv, project, "compose", "--frozen", status=2)
    assert "an overlay cannot be exported" in done.stderr


def test_an_environment_without_torch_is_refused(project: Path, hpcenv: Any) -> None:
    edit_lockfile(project, "torch", "version", "absent")
    _, done = export(hpcenv, project, "compose", "--frozen", status=2)
    assert "it has no torch" in done.stderr


def test_a_host_environment_is_refused(locked_once: Path, tmp_path: Path, hpcenv: Any) -> None:
    words = ("submit", "train.py", "--nproc", "1", "--export", str(tmp_path / "x"), "--format", "kubernetes")
    done = hpcenv(*words, cwd=locked_once)
    assert done.status == 2
    assert "host environment" in done.stderr


# -- the check ----------------------------------------------------------------------------


def check(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the check as a container does."""
    argv = [sys.executable, "-I", str(folder / "check/check.pyz"), str(folder / "lock/lock.json"), "--", *command]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environ}
    return subprocess.run(argv, env=environ, text=True, capture_output=True, cwd=folder)


SAY = "import os, hpcenv.training as t; print('RAN', os.environ['A'], os.environ['PYTHONNOUSERSITE'], t.__file__)"


def test_a_container_that_matches_becomes_the_training(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "compose")
    done = check(folder, sys.executable, "-c", SAY, A="it's")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hpcenv verdict: match" in done.stdout
    assert "nodes: not compared with each other" in done.stdout
    assert f"RAN it's 1 {folder}/check/check.pyz/hpcenv/training.py" in done.stdout
    assert check(folder, "/bin/echo", "RAN", PYTHONPATH="/other").returncode == 90, "what the ranks get, the check sees"
    assert check(folder, "/bin/sh", "-c", "exit 7").returncode == 7, (
        "the status of the training is that of the container"
    )


def test_one_changed_package_ends_it_with_90(
    project: Path, hpcenv: Any, python_with_torch: Path, tmp_path: Path
) -> None:
    folder, _ = export(hpcenv, project, "compose")
    site = next(python_with_torch.parents[1].glob("lib/python*/site-packages"))
    version = site / "torch" / "version.py"
    before = version.read_text()
    try:
        version.write_text(before + "# changed\n")
        done = check(folder, "/bin/echo", "RAN")
    finally:
        version.write_text(before)
    assert done.returncode == 90, done.stdout + done.stderr
    assert "torch" in done.stdout
    assert "RAN" not in done.stdout


def test_what_cannot_be_told_ends_it_with_91(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "compose")
    lock = folder / "lock" / "lock.json"
    data = json.loads(lock.read_text())
    data["environment"]["python"] = "no-such-python"
    lock.write_text(json.dumps(data))
    done = check(folder, "/bin/echo", "RAN")
    assert (done.returncode, "RAN" in done.stdout) == (91, False)
    assert "there is no `no-such-python` in this container" in done.stderr
    lock.write_text("{")
    assert check(folder, "/bin/echo", "RAN").returncode == 91
    assert check(folder).returncode == 91


def test_a_program_that_is_not_there_is_not_tried_again(project: Path, hpcenv: Any) -> None:
    folder, _ = export(hpcenv, project, "compose")
    done = check(folder, "/no/such/program")
    assert (done.returncode, "cannot start `/no/such/program`" in done.stderr) == (91, True)


def test_the_archive_is_small_and_complete() -> None:
    content = check_archive()
    assert len(content) <= LARGEST == 500_000
    assert content == check_archive(), "the same bytes"


def test_each_import_of_the_archive_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "check.pyz"
    path.write_bytes(check_archive())
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    missing = {
        (name, module)
        for name, text in texts.items()
        # The names of the package itself are for users.
        if name != "hpcenv/__init__.py"
        for node in ast.walk(ast.parse(text))
        for module in modules_of(node)
        if not any(f"{module.replace('.', '/')}{end}" in texts for end in (".py", "/__init__.py"))
    }
    assert not missing


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcenv"):
        return [str(node.module)]
    return [one.name for one in node.names if one.name.startswith("hpcenv")] if isinstance(node, ast.Import) else []


# -- rerun --------------------------------------------------------------------------------


def test_the_options_are_also_those_of_rerun(hpcenv: Any) -> None:
    help_text = hpcenv("rerun", "--help-all", cwd=Path("/")).stdout
    assert all(word in help_text for word in ("--export", "--format", "--volume", "skypilot"))


# -- the engines' own readers -------------------------------------------------------------

PYTHON = os.environ.get("HPCENV_TEST_EXPORTS_PYTHON") or sys.executable


def tool(name: str) -> str:
    path = Path(PYTHON).with_name(name)
    if not path.exists():
        pytest.skip(f"NOT RUN: {name} is not installed beside HPCENV_TEST_EXPORTS_PYTHON (tests/packages/exports.txt)")
    return str(path)


def accepts(*argv: str | Path) -> None:
    done = subprocess.run([str(word) for word in argv], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("kubernetes", """--from-file=T=<(printf %s "$MINE")"""),
        ("skypilot", "sky launch --secret T task.yaml"),
        ("skypilot", 'the secret MINE in the environment: export T="$MINE"'),
    ],
)
def test_a_command_to_type_has_no_value_of_a_secret(project: Path, hpcenv: Any, engine: str, said: str) -> None:
    """The shell would expand it into the list of processes."""
    _, done = export(hpcenv, project, engine, "--secret", "T=env:MINE")
    assert said in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("words", [(), ("--gpus", "2", "--allow-cpu-torch", "--secret", "T=env:T")])
def test_compose_is_by_its_specification(project: Path, hpcenv: Any, words: tuple[str, ...]) -> None:
    folder, _ = export(hpcenv, project, "compose", *words)
    accepts(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", folder / "compose.yaml")


@pytest.mark.parametrize("version", ["1.29", "1.32", "1.36"])
def test_kubernetes_knows_each_key(project: Path, hpcenv: Any, version: str) -> None:
    words = ("--gpus", "2", "--allow-cpu-torch", "--secret", "T=env:T", "--env", "A=1")
    folder, _ = export(hpcenv, project, "kubernetes", *words)
    files = (folder / "kubernetes.yaml", folder / "configmaps.yaml")
    accepts(tool("kubernetes-validate"), "--strict", "-k", version, *files)


ROUND_TRIP = """
import sys, yaml
from kubeflow_trainer_api import models
with open(sys.argv[1]) as file:
    for one in yaml.safe_load_all(file):
        kind = getattr(models, "TrainerV1alpha1" + one["kind"])
        assert kind.from_dict(one).to_dict() == one, one["kind"]
"""


def test_the_trainer_reads_each_key(project: Path, hpcenv: Any) -> None:
    tool("kubernetes-validate")
    words = ("--gpus", "2", "--allow-cpu-torch", "--secret", "T=env:T", "--env", "A=1")
    folder, _ = export(hpcenv, project, "trainjob", *words)
    accepts(PYTHON, "-c", ROUND_TRIP, folder / "trainjob.yaml")


def test_skypilot_accepts_the_task(project: Path, hpcenv: Any) -> None:
    """By the schemas of SkyPilot 0.14.1, as its functions `get_task_schema` and `get_resources_schema` return them."""
    import jsonschema

    schemas = json.loads((SCHEMAS / "skypilot-0.14.1.json").read_text())
    words = ("--gpus", "2", "--allow-cpu-torch", "--gpu-type", "h100", "--secret", "T=env:T", "--env", "A=1")
    folder, _ = export(hpcenv, project, "skypilot", *words)
    (task,) = documents(folder / "task.yaml")
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "nodes": 2}, schemas["task"])
