"""Rules for finished images."""

from __future__ import annotations

import datetime as dt

from hpcenv.errors import SpecError
from hpcenv.project import compatibility, toml_files
from hpcenv.recipes import image_content, image_lint
from hpcenv.recipes.image_content import ImageContents, ImageFile, ImageLayer

TROUBLES = image_lint.parse_troubles(toml_files.read(image_lint.PACKAGED_TROUBLES, error=SpecError))

SITE = "opt/venv/lib/python3.11/site-packages"


def file(path, size=10, *, mode=0o644, text=None):
    return ImageFile(path=path, kind="file", mode=mode, size=size, text=text)


def folder(path, mode=0o755):
    return ImageFile(path=path, kind="directory", mode=mode)


FABRIC = (
    file("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14"),
    file("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so"),
    file("usr/bin/python3.11"),
)


def contents(*layers, **more):
    found = tuple(
        one if isinstance(one, ImageLayer) else ImageLayer(name=f"layer {n}", files=one)
        for n, one in enumerate((FABRIC, *layers), start=1)
    )
    return ImageContents(origin="x", layers=found, **more)


def judged(*layers, **more):
    found = image_content.lint_contents(contents(*layers, **more), troubles=TROUBLES)
    return [(one.rule, one.place) for one in found if one.rule != "size"]


def test_a_good_image():
    assert judged((folder("opt"), file("opt/x")), user="1000", environment={"PATH": "/bin"}) == []


def test_user_and_environment():
    assert judged((), user="") == [("root-user", "")]
    assert judged((), user="0:0") == [("root-user", "")]
    assert judged((), environment={"WANDB_API_KEY": "abc"}) == [("secret-in-environment", "")]
    assert judged((), history=("RUN |1 T=ghp_" + "a" * 36,)) == [("secret-in-environment", "")]
    env = file(".singularity.d/env/90-environment.sh", text="export HF_TOKEN='hf_abc'\nexport PATH=/x\n")
    assert judged((env,)) == [("secret-in-environment", env.path)]


def test_logins_of_package_indexes():
    login = "index-url = https://alice:hunter2@index.example/simple"
    token = "[global]\nextra-index-url = https://t0ken@index.example/simple\n"
    plain = "index-url = https://index.example/simple\nuser = https://$USER:$PASS@index.example/simple"
    for path in (
        "etc/pip.conf",
        "root/.config/pip/pip.conf",
        "home/x/.pip/pip.conf",
        "etc/uv.toml",
        "opt/conda/.condarc",
    ):
        assert image_content.needs_content(path, 100), path
        assert judged((file(path, text=login),)) == [("index-credentials", f"layer 2, {path}")]
        assert judged((file(path, text=token),)) == [("index-credentials", f"layer 2, {path}")]
        assert judged((file(path, text=plain),)) == []
    auth = file("etc/apt/auth.conf", text="machine mirror.example login alice password hunter2\n")
    assert judged((auth,)) == [("index-credentials", "layer 2, etc/apt/auth.conf")]
    removed = ImageLayer(name="layer 3", files=(), removed=frozenset({"etc/apt/auth.conf"}))
    assert judged((auth,), removed) == [("secret-in-lower-layer", "layer 2, etc/apt/auth.conf")]
    assert judged((), environment={"PIP_EXTRA_INDEX_URL": "https://t0ken@index.example/simple"}) == [
        ("index-credentials", "")
    ]
    assert judged((), environment={"PIP_INDEX_URL": "https://index.example/simple"}) == []
    variables = file(".singularity.d/env/90-environment.sh", text="export UV_INDEX_LAB_PASSWORD='hunter2'\n")
    assert judged((variables,)) == [("index-credentials", variables.path)]


def test_open_notebooks():
    for text in ("c.ServerApp.token = ''", 'c.IdentityProvider.token = ""\n', '{"ServerApp": {"token": ""}}'):
        setting = file("etc/jupyter/jupyter_server_config.py", text=text)
        assert judged((setting,)) == [("open-notebook", setting.path)], text
    for text in ("c.ServerApp.token = 'abc'", "# c.ServerApp.port = 1", '{"token": "x"}'):
        assert judged((file("etc/jupyter/jupyter_server_config.py", text=text),)) == []
    assert judged((), command="jupyter lab --ServerApp.token= --ip=0.0.0.0") == [("open-notebook", "")]
    assert judged((), command="jupyter lab --ServerApp.token=abc") == []
    run = file(".singularity.d/runscript", text="exec jupyter lab --NotebookApp.token=''\n")
    assert image_content.needs_content(run.path, 100)
    assert judged((run,)) == [("open-notebook", run.path)]


def test_sshd_and_a_missing_python():
    assert judged((file("usr/sbin/sshd"),)) == [("sshd", "usr/sbin/sshd")]
    gone = ImageLayer(name="layer 2", files=(), removed=frozenset({"usr/bin/python3.11"}))
    assert judged(gone) == [("no-python", "")]


def test_a_second_cuda():
    wheel = file(f"{SITE}/nvidia/cu13/lib/libcudart.so.13")
    base = [file("usr/local/cuda-13.0/targets/x86_64-linux/lib/libcudart.so.13", 100)]
    rest = [file("usr/local/cuda-13.0/targets/x86_64-linux/lib/libcublas.so.13", 400_000_000)]
    assert judged((wheel, *base)) == []
    assert judged((*base, *rest)) == []
    assert ("second-cuda", "usr/local/cuda-13.0") in judged((wheel, *base, *rest))


def test_the_age_of_the_base():
    def found(created):
        made = contents((), base_created=created)
        return [
            one.what for one in image_content.lint_contents(made, today=dt.date(2026, 11, 23)) if one.rule == "old-base"
        ]

    assert found("2026-04-27T10:00:00Z") == ["the base is 210 days old (made 2026-04-27)"]
    assert found("2026-05-27T10:00:00.123456Z") == []  # 180 days: the limit itself
    assert found("2026-05-26") == ["the base is 181 days old (made 2026-05-26)"]
    for unknown in ("", "1970-01-01T00:00:00Z", "1980-01-01T00:00:00Z", "soon"):
        assert found(unknown) == []


def test_fabric_libraries():
    bare = ImageContents(origin="x", layers=(ImageLayer(name="", files=(file("a"),)),))
    assert "no-fabric" in [one.rule for one in image_content.lint_contents(bare)]
    half = ImageContents(origin="x", layers=(ImageLayer(name="", files=FABRIC[:1]),))
    found = [one for one in image_content.lint_contents(half) if one.rule == "no-fabric"]
    assert "no provider" in found[0].what


def test_secrets_in_the_image_and_in_layers_below():
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    first = (
        file("root/.netrc"),
        file("opt/deploy.pem", text=key),
        file("opt/ca.pem", text="-----BEGIN CERTIFICATE-----"),
    )
    second = ImageLayer(name="layer 3", files=(), removed=frozenset({"opt/deploy.pem"}))
    assert judged(first, second) == [
        ("secret-in-file", "layer 2, root/.netrc"),
        ("secret-in-lower-layer", "layer 2, opt/deploy.pem"),
    ]
    over = ImageLayer(name="layer 3", files=(file("root", 0),))
    assert ("secret-in-lower-layer", "layer 2, root/.netrc") in judged(first, over)
    opaque = ImageLayer(name="layer 3", files=(), opaque=frozenset({"opt"}))
    assert ("secret-in-lower-layer", "layer 2, opt/deploy.pem") in judged(first, opaque)


def test_keys_that_packages_ship_for_their_tests_are_no_secrets():
    assert not image_content.needs_content(f"{SITE}/tornado/test/test.key", 100)
    assert not image_content.needs_content("usr/lib/python3.11/test/keycert.pem", 100)
    assert image_content.needs_content("root/.ssh/id_ed25519", 100)
    assert image_content.needs_content(f"{SITE}/torch-2.13.0.dist-info/METADATA", 100)
    assert judged((file("root/.docker/config.json", text='{"detachKeys": "x"}'),)) == []
    assert judged((file("root/.docker/config.json", text='{"auths": {"r": {"auth": "eA=="}}}'),)) != []


def test_caches_and_hidden_bytes():
    lists = file("var/lib/apt/lists/x_Packages", 9_000_000)
    big = file("opt/big", 90_000_000)
    gone = ImageLayer(name="layer 3", files=(), removed=frozenset({"opt/big", "var/lib/apt/lists/x_Packages"}))
    assert judged((lists, big), gone) == [("cache-left", "layer 2"), ("hidden-bytes", "layer 3")]
    assert ("hidden-bytes", "layer 3") in judged((big,), (big,))
    assert judged((file("var/lib/apt/lists/lock", 0), file("tmp/x", 10))) == []


def test_folders_that_only_their_owner_may_enter():
    layer = (folder("opt", 0o700), folder("opt/venv"), folder("opt/venv/lib"), folder(SITE), folder("srv", 0o700))
    assert judged(layer) == [("private-folder", "opt")]


def dists(*names):
    return tuple(file(f"{SITE}/{name}.dist-info/METADATA") for name in names)


def test_packages():
    report = file("usr/share/hpcenv/pip-report.json")
    found = judged((*dists("torch-2.2.2+cpu", "numpy-2.1.0", "nvidia_cuda_runtime_cu12-12.6"), report))
    assert found == [("cpu-torch", SITE), ("known-trouble", SITE)]
    assert judged(dists("torch-2.13.0")) == [("no-install-report", "")]
    metadata = "Name: torch\nRequires-Dist: nvidia-nccl-cu12==2.27.5; x\nRequires-Dist: nvidia-cudnn-cu12==9.1\n\nRequires-Dist: nvidia-y==1\n"
    layer = (file(f"{SITE}/torch-2.9.1.dist-info/METADATA", text=metadata.replace("; x", "")), report)
    found = judged((*layer, *dists("nvidia_nccl_cu12-2.28.3", "nvidia_cudnn_cu12-9.1", "nvidia_y-2")))
    assert found == [("library-mismatch", SITE)]


def test_packages_that_do_not_fit_together():
    metadata = "Name: high\nRequires-Dist: low<2\nRequires-Dist: absent; extra == 'x'\n\nRequires-Dist: text\n"
    high = file(f"{SITE}/high-3.0.dist-info/METADATA", text=metadata)
    assert judged((high, *dists("low-1.5"))) == []
    [found] = image_content.lint_contents(contents((high, *dists("low-2.5"))), troubles=TROUBLES)
    assert (found.rule, found.what) == ("package-conflict", "high 3.0 requires low<2: 2.5 is installed")


def test_bytecode_that_is_missing():
    modules = tuple(file(f"{SITE}/m{n}.py") for n in range(300))
    compiled = tuple(file(f"{SITE}/__pycache__/m{n}.cpython-311.pyc") for n in range(300))
    assert judged(modules) == [("no-bytecode", SITE)]
    assert judged(modules + compiled) == []


def test_size_by_layer_with_advice():
    layer = (file(f"{SITE}/torch/lib/libtorch.so", 900_000_000), file("opt/x/lib/libfoo.a", 200_000_000))
    found = [one for one in image_content.lint_contents(contents(layer)) if one.rule == "size"]
    assert len(found) == 1
    assert found[0].place == "layer 2"
    assert f"1.1 GB unpacked: {SITE}/torch 900 MB" in found[0].what
    assert "static libraries" in found[0].advice


def test_a_thousand_findings_of_one_rule_do_not_hide_the_others():
    layer = tuple(file(f"home/u{n}/.netrc") for n in range(1000))
    found = judged(layer, user="")
    assert 0 < sum(rule == "secret-in-file" for rule, _ in found) <= 20
    assert ("root-user", "") in found


def around_torch(*names, text=None):
    found = [
        file(f"{SITE}/{name}.dist-info/METADATA", text=text if name.startswith("torch-") else None) for name in names
    ]
    result = image_content.lint_contents(contents((folder(SITE), *found)), table=compatibility.table())
    return [(one.severity, one.what) for one in result if one.rule == "library-mismatch"]


def test_what_is_around_torch_is_judged_by_the_table():
    assert around_torch("torch-2.9.1", "torchvision-0.24.1", "nvidia_cudnn_cu12-9.10.2.21") == []
    assert around_torch("torch-2.9.1", "torchvision-0.24.0") == [
        ("warn", "torchvision 0.24.0 requires torch ==2.9.0, here is 2.9.1")
    ]
    assert around_torch("torch-2.9.1", "torchvision-0.23.0", "nvidia_nccl_cu12-2.29.7") == [
        ("error", "torchvision 0.23.0 requires torch ==2.8.0, here is 2.9.1"),
        ("warn", "torch 2.9.1 requires NCCL ==2.27.5, here is 2.29.7"),
    ]
    # A build whose libraries the table does not have, and a torch that it does not have: nothing is claimed.
    assert around_torch("torch-2.9.1+cu126", "nvidia_nccl_cu12-2.29.7") == []
    assert around_torch("torch-2.99.0", "torchvision-0.23.0") == []


def test_the_metadata_of_torch_counts_more_than_the_table():
    text = "Name: torch\nRequires-Dist: nvidia-nccl-cu12==2.29.7\n\nbody"
    assert around_torch("torch-2.9.1", "nvidia_nccl_cu12-2.29.7", text=text) == []
