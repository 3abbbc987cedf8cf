"""A package with a CUDA kernel, compiled into an image without a GPU: `image init --build`, locked, run on two nodes.

The compiler nvcc comes as wheels from the index that this machine's pip is configured for, g++ from the mirror that
its apt is configured for. The testbed's nodes have no network: both lie in folders of alice's (see test_cuda_image.py).

With `--build-base` nvcc is in an image: the testbed's base with the same wheels unpacked in /usr/local/cuda, where
nvidia/cuda's devel images have the toolkit.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from tests.conftest import hpcenv

from .conftest import IMAGE, Cluster, Project
from .test_cuda_image import CUDA, TORCH, download, give_to_alice, make_site
from .test_dockerfile import PUSH_LAYER
from .test_image_init import PUSH, debian_packages, fabric_packages

# The first test waits for gigabytes of wheels, and for their image.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

NAME, VERSION = "tiny-cuda", "1.0"
COMPILER = ("g++", "make", "python3-dev", "python3-venv", "python3-pip", "ca-certificates", "python3")

SOURCES = {
    "setup.py": """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(
    name="tiny-cuda",
    version="1.0",
    packages=["tiny_cuda"],
    ext_modules=[CUDAExtension("tiny_cuda.kernels", ["tiny_cuda/bind.cpp", "tiny_cuda/kernel.cu"])],
    cmdclass={"build_ext": BuildExtension},
)
""",
    "tiny_cuda/__init__.py": "import torch\nfrom tiny_cuda.kernels import add_one\n",
    "tiny_cuda/bind.cpp": """
#include <torch/extension.h>
void add_one_on_gpu(torch::Tensor values);
void add_one(torch::Tensor values) {
  if (values.is_cuda()) add_one_on_gpu(values); else values.add_(1);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("add_one", &add_one); }
""",
    "tiny_cuda/kernel.cu": """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
__global__ void add_one_kernel(float *values, long count) {
  long n = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (n < count) values[n] += 1;
}
void add_one_on_gpu(torch::Tensor values) {
  long count = values.numel();
  auto stream = at::cuda::getCurrentCUDAStream();
  add_one_kernel<<<(count + 255) / 256, 256, 0, stream>>>(values.data_ptr<float>(), count);
}
""",
    "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-cuda\nVersion: 1.0\n",
}

# A node has no real GPU: the compiled module is loaded, its path for the CPU runs, and the kernel is in its file.
USE = """
import os, platform, torch, tiny_cuda, tiny_cuda.kernels
values = torch.zeros(3)
tiny_cuda.add_one(values)
held = open(tiny_cuda.kernels.__file__, "rb").read()
kernel = b".nv_fatbin" in held and b"add_one_kernel" in held
print(f"rank {os.environ['RANK']} on {platform.node()}: sum {values.sum().item():.0f}, kernel {kernel}", flush=True)
"""


def source_archive(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_cuda-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in SOURCES.items():
            member = tarfile.TarInfo(f"tiny_cuda-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def toolkit_layer(wheels: Path, path: Path) -> None:
    """Write the layer of an image with the CUDA toolkit: the compiler, cudart, and the headers of CUDA's libraries."""
    inside = f"nvidia/cu{CUDA.partition('.')[0]}/"
    whole = ("nvidia_cuda_nvcc", "nvidia_cuda_crt", "nvidia_nvvm", "nvidia_cuda_cccl", "nvidia_cuda_runtime")
    with tarfile.open(path, "w") as layer:
        for wheel in sorted(wheels.glob("nvidia_*.whl")):
            with zipfile.ZipFile(wheel) as content:
                for entry in content.infolist():
                    name = entry.filename.removeprefix(inside)
                    wanted = wheel.name.startswith(whole) or name.startswith("include/")
                    if name == entry.filename or not wanted or entry.is_dir():
                        continue
                    member = tarfile.TarInfo(f"usr/local/cuda/{name}")
                    executable = entry.external_attr >> 16 & 0o100
                    member.size, member.mode = entry.file_size, 0o755 if executable else 0o644
                    layer.addfile(member, content.open(entry))
        for name, target in (("lib64", "lib"), ("lib/libcudart.so", f"libcudart.so.{CUDA.partition('.')[0]}")):
            link = tarfile.TarInfo(f"usr/local/cuda/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, target
            layer.addfile(link)


@pytest.fixture(scope="module", params=["wheels", "build-base"])
def project(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """alice's project with the recipe, her index, the source archive, and the SIF that she builds."""
    host, name = IMAGE.removeprefix("docker://").split("/", 1)
    digest = cluster.must("python3", "-", host, name, stdin=PUSH).strip()
    here = tmp_path_factory.mktemp("compiled")
    source = source_archive(here / "sources")
    (here / "hpcenv.toml").write_text('image = "image/image.def"\n[host]\ngpu = "h100"\n')
    words = ("image", "init", "--torch", TORCH, "--cuda", CUDA, "--base", f"{host}/hpcenv/base@{digest}")
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {source.parent}"
    environ = {**os.environ, "PIP_FIND_LINKS": links}

    def init(*more: str) -> None:
        done = hpcenv(*words, "--build", f"{NAME}=={VERSION}", *more, cwd=here, environ=environ, timeout=600)
        assert done.status == 0, done.stderr
        assert "TORCH_CUDA_ARCH_LIST=9.0" in done.stdout

    init()
    wheels = here / "wheels"
    for lock in ("requirements.lock", "requirements.build.lock"):
        shutil.copytree(download(here / "image" / lock), wheels, dirs_exist_ok=True, copy_function=os.link)
    inside = f"/home/alice/hpcenv-tests/compiled-{uuid.uuid4().hex[:6]}"
    folder = Path(json.loads(cluster.testbed("status", "--json").stdout)["state"]) / inside.lstrip("/")
    folder.mkdir(parents=True)
    if request.param == "build-base":
        toolkit_layer(wheels, folder / "toolkit.tar")
        settings = json.dumps({"Env": ["PATH=/usr/local/cuda/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["bash"]})
        give_to_alice(folder)
        devel = cluster.must("python3", "-", host, digest, f"{inside}/toolkit.tar", settings, stdin=PUSH_LAYER).strip()
        init("--build-base", f"{host}/hpcenv/base@{devel}")
        assert "nvidia-cuda-nvcc" not in (here / "image" / "requirements.build.lock").read_text()
    shutil.copytree(here / "image", folder / "image")
    site = folder / "image" / "site"
    packages = [*fabric_packages(), *debian_packages("compiler-debs", COMPILER)]
    make_site(site, wheels, packages, pip="find-links = /mnt/sources\n")
    shutil.copytree(source.parent, site / "sources")
    (folder / "use.py").write_text(USE)
    spec = f'image = "image/image.def"\nplain-http = ["{host}"]\n[host]\ngpu = "h100"\n'
    (folder / "hpcenv.toml").write_text(f'{spec}[paths]\nstore = "{inside}/store"\n')
    give_to_alice(folder)
    made = Project(cluster, inside)
    made.must("image", "build", "image/image.def", "--bind", "image/site:/mnt:ro", "--plain-http", host, timeout=1800)
    yield made
    cluster.run("sh", "-c", f"chmod -R u+w {inside}; rm -rf {inside}", timeout=600)


@pytest.fixture(scope="module")
def locked(project: Project) -> dict:
    index = f"PIP_INDEX_URL=file://{project.folder}/image/site/index/simple"
    done = project.cluster.run("env", index, "hpcenv", "lock", cwd=project.folder, timeout=900)
    assert done.status == 0, done.text
    return tomlkit.parse(project.cluster.must("cat", f"{project.folder}/lockfiles/default.lock.toml")).unwrap()


def test_the_lock_says_what_was_compiled_and_by_what(project: Project, locked: dict) -> None:
    (dist,) = [one for one in locked["packages"]["dist"] if one["name"] == NAME]
    wheel, built = dist["wheel"], dist["wheel"]["built"]
    assert wheel["proof"] == "built"
    assert re.fullmatch(r"[0-9a-f]{64}", wheel["sha256"])
    assert built["arch-list"] == "9.0"
    assert re.fullmatch(rf"{re.escape(CUDA)}\.\d+", built["nvcc"])
    assert built["compiler"].startswith("c++ (Debian 12.")
    archive = project.cluster.must("sha256sum", f"{project.folder}/image/site/sources/tiny_cuda-1.0.tar.gz")
    assert built["source-sha256"] == archive.split()[0]
    project.must("lock", "--check", "--require-hashes", timeout=600)


def test_both_nodes_load_what_was_compiled(project: Project, locked: dict) -> None:
    # The testbed's GPUs are H100s that only NVML lists: the gate compares what was compiled with them, and no kernel can run.
    words = ("--nodes", "2", "--gpus", "1", "--skip-check", "cuda.start", "--wait")
    done = project.cluster.run("hpcenv", "submit", "use.py", *words, cwd=project.folder, timeout=600)
    run = re.search(r"submitted (\S+):", done.text)[1]
    log = project.cluster.must("cat", f"{project.folder}/runs/{run}/job.log")
    assert done.status == 0, done.text + log[-4000:]
    assert "GPUs: not tried (--skip-check cuda.start)" in done.text
    assert "hpcenv verdict: match: 2 nodes" in log
    said = re.findall(r"rank (\d) on (n\d): sum 3, kernel True", log)
    assert sorted(said) == [("0", "n1"), ("1", "n2")]
