"""The libraries under torch, and how each one reports its version.

Runs on: inside the image, and COMPUTE NODE: the launch step reads versions, too, and loads no other module of the
probe.
"""

from __future__ import annotations

from hpcenv.incontainer.probe.values import Unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.values import Value

# Library -> stem of the file name, form in which its C function returns the version, name of this function. None of
# these functions needs a GPU.
LIBRARIES = {
    "cudart": ("libcudart", "packed", "cudaRuntimeGetVersion"),
    "cublas": ("libcublas", "property", "cublasGetProperty"),
    "cublaslt": ("libcublasLt", "property", "cublasLtGetProperty"),
    "cudnn": ("libcudnn", "size_t", "cudnnGetVersion"),
    "nccl": ("libnccl", "packed", "ncclGetVersion"),
    "cufft": ("libcufft", "property", "cufftGetProperty"),
    "cusparse": ("libcusparse", "property", "cusparseGetProperty"),
    "cusparselt": ("libcusparseLt", "property", "cusparseLtGetProperty"),
    "nvrtc": ("libnvrtc", "pair", "nvrtcVersion"),
    "nvjitlink": ("libnvJitLink", "pair", "nvJitLinkVersion"),
    "nvshmem": ("libnvshmem_host", "triple", "nvshmemx_vendor_get_version_info"),
    # The version of torch's own libraries is torch.version and torch.git-version.
    "libtorch": ("libtorch", "", ""),
    "libtorch_cpu": ("libtorch_cpu", "", ""),
    "libtorch_cuda": ("libtorch_cuda", "", ""),
}
# Level record identifies these libraries by build-id and origin only, because loading libcublasLt takes 150 MiB and 70
# ms.
HEAVY = ("cublas", "cublaslt")


def version_in_words(name: str, numbers: list[int]) -> Value:
    """Return a version from the numbers that a library reports."""
    if len(numbers) > 1:
        plausible = any(numbers) and all(0 <= n < 1_000_000 for n in numbers)
        return ".".join(map(str, numbers)) if plausible else Unknown(f"the library reports {numbers}, not a version")
    return _dotted(name, numbers[0])


def _dotted(name: str, number: int) -> Value:
    """Return a version that a library packs into one integer. The packing differs by library and by version."""
    if number < 1000:
        return Unknown(f"the library reports {number}, which is not a version")
    if name == "cudart":  # 13000 is 13.0, 12080 is 12.8
        return f"{number // 1000}.{number % 1000 // 10}"
    # NCCL until 2.8 and cuDNN until 8 used thousands: 2708 is 2.7.8, 8902 is 8.9.2. Newer ones use 22907, 92000.
    unit = 1000 if number < 10000 else 10000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
