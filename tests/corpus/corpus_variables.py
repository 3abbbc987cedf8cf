"""Changes of variables: of [env] after the lock, of the command line, of the shell that submits, of one node."""

from __future__ import annotations

from corpus_harmless import harmless
from corpus_mutations import mutation
from corpus_world import Case


def passed(case: Case, name: str, value: str) -> None:
    """Let a variable of the submitting shell through with --pass-env."""
    case.environ[name] = value
    case.options["pass_env"] = (*case.options.get("pass_env", ()), name)


# -- variables that change which code runs ------------------------------------------------


@mutation("gate", "libs.ld-audit")
def ld_audit_by_the_command_line(case: Case) -> None:
    case.variable("LD_AUDIT", "/opt/tools/audit.so")


@mutation("gate", "libs.ld-audit")
def ld_audit_passed_on(case: Case) -> None:
    passed(case, "LD_AUDIT", "/opt/tools/audit.so")


@mutation("gate", "libs.ld-preload")
def ld_preload_passed_on(case: Case) -> None:
    passed(case, "LD_PRELOAD", "/opt/tools/preload.so")


@mutation("gate", "libs.ld-audit", "env.LD_AUDIT", "lockfile.edited")
def ld_audit_added_to_env_and_not_looked_at(case: Case) -> None:
    case.project_variable("LD_AUDIT", "/opt/tools/audit.so")
    case.options["frozen"] = True


@mutation("gate", "libs.glibc-tunables", severity="warn")
def glibc_tunables_by_the_command_line(case: Case) -> None:
    case.variable("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2")


@mutation("gate", "libs.glibc-tunables", profile="bitwise")
def glibc_tunables_under_the_bitwise_profile(case: Case) -> None:
    passed(case, "GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2")


@mutation("gate", "python.variables")
def pythonoptimize_passed_on(case: Case) -> None:
    passed(case, "PYTHONOPTIMIZE", "2")


@mutation("gate", "python.variables")
def pythonoptimize_by_the_command_line(case: Case) -> None:
    case.variable("PYTHONOPTIMIZE", "1")


@mutation("gate", "python.variables", "python.unchecked-pyc")
def compiled_files_from_another_place(case: Case) -> None:
    case.variable("PYTHONPYCACHEPREFIX", str(case.root / "cache"))


@mutation("gate", "python.variables")
def the_folder_of_the_script_taken_away(case: Case) -> None:
    case.variable("PYTHONSAFEPATH", "1")


@mutation("gate", "environment", "python.variables")
def another_folder_of_the_standard_library(case: Case) -> None:
    case.variable("PYTHONPLATLIBDIR", "lib-of-nobody")


@mutation("gate", "python.variables")
def warnings_that_import_a_module(case: Case) -> None:
    case.variable("PYTHONWARNINGS", "ignore::purepkg.core.Warning")


@mutation("gate", "python.variables")
def frozen_modules_off(case: Case) -> None:
    case.variable("PYTHON_FROZEN_MODULES", "off")


# -- [env] against the lockfile -----------------------------------------------------------


def _locked_with(case: Case, **env: str) -> None:
    lines = "".join(f'{name} = "{value}"\n' for name, value in env.items())
    case.spec(f"[env]\n{lines}")
    case.world.lock(case.root)


def _edit_env(case: Case, old: str, new: str) -> None:
    path = case.root / "hpcenv.toml"
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


@mutation("lockfile", "stale.env-changed")
def variable_added_to_env_after_the_lock(case: Case) -> None:
    case.project_variable("OPENBLAS_CORETYPE", "Haswell")


@mutation("lockfile", "stale.env-changed")
def variable_of_env_changed_after_the_lock(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell")
    _edit_env(case, "Haswell", "Prescott")


@mutation("lockfile", "stale.env-changed")
def variable_taken_out_of_env_after_the_lock(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell")
    _edit_env(case, 'OPENBLAS_CORETYPE = "Haswell"\n', "")


@mutation("lockfile", "stale.env-changed")
def variable_of_env_in_another_case(case: Case) -> None:
    _locked_with(case, MKL_CBWR="AVX2")
    _edit_env(case, "MKL_CBWR", "mkl_cbwr")


@mutation("lockfile", "stale.env-changed")
def credential_added_to_env(case: Case) -> None:
    case.project_variable("WANDB_API_KEY", "abc")


@mutation("gate", "stale.env-changed")
def env_changed_before_a_submission(case: Case) -> None:
    case.project_variable("NVIDIA_TF32_OVERRIDE", "1")


@mutation("lockfile", "stale.edited", "stale.env-changed")
def env_changed_in_the_lockfile(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell")
    case.edit_lockfile(lambda text: text.replace("Haswell", "Prescott"))


def _frozen(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell")
    _edit_env(case, "Haswell", "Prescott")
    case.options["frozen"] = True


mutation("gate", "env.OPENBLAS_CORETYPE", severity="warn", name="env-changed-and-frozen")(_frozen)
mutation("gate", "env.OPENBLAS_CORETYPE", profile="bitwise", name="env-changed-and-frozen-under-bitwise")(_frozen)


@mutation("gate", "env.MKL_CBWR", severity="warn")
def variable_added_to_env_and_frozen(case: Case) -> None:
    case.project_variable("MKL_CBWR", "COMPATIBLE")
    case.options["frozen"] = True


@mutation("gate", "env.OPENBLAS_CORETYPE", profile="bitwise")
def variable_taken_out_of_env_and_frozen(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell")
    _edit_env(case, 'OPENBLAS_CORETYPE = "Haswell"\n', "")
    case.options["frozen"] = True


def _overridden(case: Case) -> None:
    _locked_with(case, OMP_NUM_THREADS="4")
    case.variable("OMP_NUM_THREADS", "8")


mutation("gate", "env.OMP_NUM_THREADS", severity="warn", name="locked-variable-replaced-by-the-command-line")(
    _overridden
)
mutation("gate", "env.OMP_NUM_THREADS", profile="bitwise", name="locked-variable-replaced-under-bitwise")(_overridden)


@mutation("relock", "relock.env.OPENBLAS_CORETYPE")
def env_changed_and_locked_again(case: Case) -> None:
    case.project_variable("OPENBLAS_CORETYPE", "Haswell")


@mutation("diff", "env.OPENBLAS_CORETYPE", severity="warn")
def env_of_two_lockfiles(case: Case) -> None:
    case.world.lock(case.root, name="before")
    case.project_variable("OPENBLAS_CORETYPE", "Haswell")
    case.world.lock(case.root, name="after")


# -- variables of the shell are shown -----------------------------------------------------


def _shown_from_the_shell(name: str, value: str) -> None:
    def apply(case: Case) -> None:
        case.environ[name] = value

    mutation("gate", f"shown.{name}", severity="info", name=f"{name}-of-the-shell-is-shown")(apply)


def _shown_when_passed(name: str, value: str) -> None:
    def apply(case: Case) -> None:
        passed(case, name, value)

    mutation("gate", f"shown.{name}", severity="info", name=f"{name}-passed-on-is-shown")(apply)


for _name, _value in {
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "2",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "TORCH_EXTENSIONS_DIR": "/home/alice/ext",
    "KMP_AFFINITY": "granularity=fine",
    "CUDA_LAUNCH_BLOCKING": "1",
    "GOMP_SPINCOUNT": "1000",
    "OMP_SCHEDULE": "dynamic",
    "OMP_NUM_THREADS": "3",
    "NCCL_ALGO": "Ring",
    "UCX_TLS": "tcp",
    "MIOPEN_FIND_MODE": "3",
}.items():
    _shown_from_the_shell(_name, _value)
for _name, _value in {
    "PYTHONHASHSEED": "7",
    "PYTHONBREAKPOINT": "x.y",
    "PYTHONSTARTUP": "/x",
    "OPENBLAS_CORETYPE": "Haswell",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HF_HUB_OFFLINE": "1",
}.items():
    _shown_when_passed(_name, _value)


# -- variables of one node ----------------------------------------------------------------


def _on_second_node(case: Case, **variables: str) -> None:
    other = case.world.copy(case.root / "second-node")
    other.options = dict(case.options)
    for name in ("hpcenv.toml", "lockfiles/default.lock.toml"):
        (other.root / name).unlink()
        (other.root / name).write_bytes((case.root / name).read_bytes())
    other.environ |= variables
    case.hosts["n2"].case = other


def _mkl(case: Case) -> None:
    _on_second_node(case, MKL_CBWR="COMPATIBLE")


mutation("nodes", "env.MKL_CBWR", severity="warn", needs=("gcc",), name="variable-on-one-node-only")(_mkl)
mutation("nodes", "env.MKL_CBWR", needs=("gcc",), profile="bitwise", name="variable-on-one-node-under-bitwise")(_mkl)


@mutation("nodes", "env.NCCL_ALGO", severity="warn", needs=("gcc",))
def tuning_of_the_network_on_one_node_only(case: Case) -> None:
    _on_second_node(case, NCCL_ALGO="Tree")


@mutation("nodes", "env.OMP_NUM_THREADS", severity="warn", needs=("gcc",))
def threads_on_one_node_only(case: Case) -> None:
    _on_second_node(case, OMP_NUM_THREADS="1")


# -- harmless -----------------------------------------------------------------------------


@harmless("nodes", needs=("gcc",))
def variables_of_a_login_that_differ_between_nodes(case: Case) -> None:
    _on_second_node(
        case,
        **{"TMPDIR": "/local/2", "HOSTNAME": "n2", "CUDA_VISIBLE_DEVICES": "2,3", "SLURM_NODEID": "1", "TERM": "dumb"},
        **{"LOADEDMODULES": "x", "EDITOR": "vi", "SLURMD_NODENAME": "n2", "XDG_RUNTIME_DIR": "/run/user/7"},
    )


@harmless("gate")
def variables_without_an_effect(case: Case) -> None:
    for name, value in {
        "PYTHONOPTIMIZE": "0",
        "PYTHONHOME": "",
        "PYTHONPYCACHEPREFIX": "",
        "LD_AUDIT": "",
        "GLIBC_TUNABLES": "",
        "PYTHONWARNINGS": "ignore::UserWarning,default",
    }.items():
        case.variable(name, value)


@harmless("gate")
def variables_that_python_reads_and_that_change_no_code(case: Case) -> None:
    for name, value in {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONFAULTHANDLER": "1"}.items():
        passed(case, name, value)


@harmless("gate")
def variable_of_the_tokenizers(case: Case) -> None:
    case.variable("TOKENIZERS_PARALLELISM", "false")


@harmless("gate")
def env_locked_and_used_as_it_is(case: Case) -> None:
    _locked_with(case, OPENBLAS_CORETYPE="Haswell", OMP_NUM_THREADS="4", LD_AUDIT="", PYTHONOPTIMIZE="1")


@harmless("gate")
def command_line_gives_a_locked_variable_its_locked_value(case: Case) -> None:
    _locked_with(case, OMP_NUM_THREADS="4")
    case.variable("OMP_NUM_THREADS", "4")


@harmless("lockfile")
def env_in_another_order(case: Case) -> None:
    _locked_with(case, A="1", B="2")
    _edit_env(case, 'A = "1"\nB = "2"\n', 'B = "2"\nA = "1"\n')


@harmless("lockfile")
def env_without_a_variable(case: Case) -> None:
    case.spec("[env]\n")


@harmless("lockfile")
def another_value_of_a_credential(case: Case) -> None:
    _locked_with(case, WANDB_API_KEY="abc")
    _edit_env(case, "abc", "def")


@harmless("lockfile")
def another_password_of_a_proxy(case: Case) -> None:
    _locked_with(case, https_proxy="http://alice:one@proxy:3128")
    _edit_env(case, "alice:one", "bob:two")
