"""The table of determinism switches: the values of each profile, how they are set, and how they are read back.

`hpcenv submit` takes the environment variables of the profile from this table. Each rank applies and reads the other
switches. docs/reference/determinism.md is made from this table.
"""

import os
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

PROFILES = ("off", "seeded", "bitwise")
NOT_SET = "(not set)"


class Switch(NamedTuple):
    """One switch.

    Attributes:
        name: name in the record of a rank and in the documentation.
        read: the environment variable, or the expression of torch that gives the effective value.
        why: what the switch changes.
        source: the document or the trial on which `why` is based.
        seeded, bitwise: value in the profile with this name; None if the profile only records the switch.
        since: first torch that has the switch; empty for every torch from 2.0 on, and for variables.
        nccl: first NCCL for which the variable is set, for example (2, 24); only runs with the backend nccl get it.
        nccl_below: first NCCL for which the variable is no longer set.
        gpus: whether the variable is set only in runs with GPUs.
    """

    name: str
    read: str
    why: str
    source: str
    seeded: Any = None
    bitwise: Any = None
    since: str = ""
    nccl: Optional[Tuple[int, int]] = None
    nccl_below: Tuple[int, int] = (99, 0)
    gpus: bool = False

    @property
    def is_variable(self) -> bool:
        return self.name == self.read

    def asked(self, profile: str) -> Any:
        """Return the value of the switch in a profile; None if the profile only records the switch."""
        return {"seeded": self.seeded, "bitwise": self.bitwise}.get(profile)


SEED = "the base seed"

_ENV_RST = "NCCL user guide, env.rst (2.30), 2026-06-11"
_REPRODUCIBILITY = "PyTorch notes, Reproducibility (2.13)"
_NUMERIC = "PyTorch notes, Numerical accuracy, CUDA semantics (2.13)"
_TRIED = "tried with torch 2.13 on CPU, 2026-11-22"

SWITCHES = (
    # -- environment variables: before Python or CUDA starts -----------------------------------
    Switch("PYTHONHASHSEED", "PYTHONHASHSEED", "order of sets of texts",
           "Python documentation, using/cmdline", SEED, SEED),
    Switch("CUBLAS_WORKSPACE_CONFIG", "CUBLAS_WORKSPACE_CONFIG", "cuBLAS chooses algorithms by its workspace",
           "cuBLAS documentation, Results reproducibility", ":4096:8", ":4096:8", gpus=True),
    Switch("NCCL_ALGO", "NCCL_ALGO", "order of the sums of an all-reduce; NCCL before 2.24 has no lists for each "
           "collective", _ENV_RST, None, "allreduce:ring", nccl=(2, 24)),
    Switch("NCCL_PROTO", "NCCL_PROTO", "protocols cut messages differently", _ENV_RST, None, "Simple", nccl=(2, 5)),
    Switch("NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE", "sums inside NVSwitch differ from run to run",
           "NVIDIA/nccl issue 1497", None, "0", nccl=(2, 17)),
    Switch("NCCL_COLLNET_ENABLE", "NCCL_COLLNET_ENABLE", "sums inside network switches", _ENV_RST, None, "0",
           nccl=(2, 6)),
    Switch("NCCL_PAT_ENABLE", "NCCL_PAT_ENABLE", "another order of the sums of a reduce-scatter", _ENV_RST, None, "0",
           nccl=(2, 23)),
    Switch("OMP_NUM_THREADS", "OMP_NUM_THREADS", "the number of threads changes sums on CPU; hpcenv always sets it, "
           "because torchrun does so only for several ranks on a node", _TRIED),
    Switch("MKL_NUM_THREADS", "MKL_NUM_THREADS", "the number of threads changes sums on CPU", _TRIED),
    Switch("MKL_CBWR", "MKL_CBWR", "other kernels of MKL", _TRIED),
    Switch("ATEN_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY", "other vector instructions on CPU", _TRIED),
    Switch("ONEDNN_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "other kernels of oneDNN", _TRIED),
    # -- torch ---------------------------------------------------------------------------------
    Switch("torch.deterministic-mode", "get_deterministic_debug_mode()", "kernels with a fixed order; 1: torch warns "
           "of other kernels, 2: it raises an error", _REPRODUCIBILITY, 1, 2),
    Switch("torch.fill-uninitialized-memory", "utils.deterministic.fill_uninitialized_memory",
           "memory that is read before it is written", _REPRODUCIBILITY, None, True, since="2.2"),
    Switch("torch.cudnn.deterministic", "backends.cudnn.deterministic", "algorithms of convolutions",
           _REPRODUCIBILITY, True, True),
    Switch("torch.cudnn.benchmark", "backends.cudnn.benchmark", "cuDNN chooses by measured time", _REPRODUCIBILITY,
           False, False),
    Switch("torch.cudnn.allow-tf32", "backends.cudnn.allow_tf32", "TF32 in convolutions and RNNs", _NUMERIC, None,
           False),
    Switch("torch.cuda.matmul.allow-tf32", "backends.cuda.matmul.allow_tf32", "TF32 in matrix products", _NUMERIC,
           None, False),
    Switch("torch.float32-matmul-precision", "get_float32_matmul_precision()", "TF32 or bfloat16 in matrix products",
           _NUMERIC, None, "highest"),
    Switch("torch.fp32-precision", "backends.fp32_precision", "the same by its newer name", _NUMERIC, since="2.9"),
    Switch("torch.cudnn.conv.fp32-precision", "backends.cudnn.conv.fp32_precision", "the same by its newer name",
           _NUMERIC, since="2.9"),
    Switch("torch.cudnn.rnn.fp32-precision", "backends.cudnn.rnn.fp32_precision", "the same by its newer name",
           _NUMERIC, since="2.9"),
    Switch("torch.mkldnn.matmul.fp32-precision", "backends.mkldnn.matmul.fp32_precision", "TF32 or bfloat16 on CPU",
           _NUMERIC, since="2.9"),
    Switch("torch.cuda.matmul.allow-fp16-reduced-precision-reduction",
           "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", "sums of float16 in float16", _NUMERIC, None,
           False),
    Switch("torch.cuda.matmul.allow-bf16-reduced-precision-reduction",
           "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", "sums of bfloat16 in bfloat16", _NUMERIC,
           None, False),
    Switch("torch.cuda.matmul.allow-fp16-accumulation", "backends.cuda.matmul.allow_fp16_accumulation",
           "sums of float16 in float16", _NUMERIC, None, False, since="2.7"),
    Switch("torch.num-threads", "get_num_threads()", "the number of threads changes sums on CPU", _TRIED),
    Switch("torch.num-interop-threads", "get_num_interop_threads()", "threads of independent operations", _TRIED),
    Switch("torch.cpu-capability", "backends.cpu.get_cpu_capability()", "vector instructions on CPU; not set: it is "
           "the hardware's", _TRIED, since="2.1"),
    Switch("torch.flash-sdp", "backends.cuda.flash_sdp_enabled()", "kernel of attention", _NUMERIC),
    Switch("torch.mem-efficient-sdp", "backends.cuda.mem_efficient_sdp_enabled()", "kernel of attention", _NUMERIC),
    Switch("torch.initial-seed", "initial_seed()", "the seed of torch's generator; a script may set its own",
           _REPRODUCIBILITY),
)  # fmt: skip


def variables_of(
    profile: str, *, seed: int, nccl: Optional[Tuple[int, int]], gpus: bool, seeds: bool = False
) -> Dict[str, str]:
    """Return the environment variables that a profile requires. Pure.

    Args:
        profile: one of PROFILES.
        seed: base seed of the run.
        nccl: the locked version of NCCL; None if the run does not use NCCL, or if the version is unknown.
        gpus: whether the run uses GPUs.
        seeds: whether the ranks are seeded with every profile.
    """
    found = {}
    for switch in SWITCHES:
        value = SEED if seeds and switch.seeded is SEED else switch.asked(profile)
        if not switch.is_variable or value is None or (switch.gpus and not gpus):
            continue
        if switch.nccl is not None and (nccl is None or not switch.nccl <= nccl < switch.nccl_below):
            continue
        found[switch.name] = str(seed % (1 << 32)) if value is SEED else str(value)
    return found


def apply_to_torch(torch: Any, profile: str) -> List[str]:
    """Set the switches of torch; return a text for each switch that could not be set."""
    problems = []
    for switch in SWITCHES:
        value = switch.asked(profile)
        if switch.is_variable or value is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old names warn, but set old and new switches
                _set(torch, switch, value)
        except AttributeError:
            if not switch.since:
                problems.append("%s: this torch does not have it" % switch.name)
        except Exception as error:
            problems.append("%s: %s" % (switch.name, error))
    return problems


def _set(torch: Any, switch: Switch, value: Any) -> None:
    if switch.name == "torch.deterministic-mode":
        torch.use_deterministic_algorithms(True, warn_only=value == 1)
    elif switch.name == "torch.float32-matmul-precision":
        torch.set_float32_matmul_precision(value)
    else:
        place, _, name = switch.read.rpartition(".")
        owner = _walk(torch, place)
        getattr(owner, name)  # an unknown name would be set without an effect
        setattr(owner, name, value)


def _walk(torch: Any, path: str) -> Any:
    found = torch
    for name in path.split("."):
        found = getattr(found, name)
    return found


def read_value(switch: Switch, torch: Any) -> Optional[str]:
    """Return the effective value as text; None if the value cannot be read now."""
    if switch.is_variable:
        return os.environ.get(switch.name, NOT_SET)
    if torch is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _walk(torch, switch.read[:-2] if switch.read.endswith("()") else switch.read)
            value = found() if switch.read.endswith("()") else found
    except Exception:  # a different torch, or old and new names contradict each other
        return None
    return str(value)


def asked_values(profile: str, variables: Dict[str, str]) -> Dict[str, str]:
    """Return the requested value of each switch as text; switches that are only recorded are left out.

    Args:
        profile: one of PROFILES.
        variables: variables that the profile required in this run.
    """
    wanted = {s.name: s.asked(profile) for s in SWITCHES if not s.is_variable and s.asked(profile) is not None}
    return {**{name: str(value) for name, value in wanted.items()}, **variables}
