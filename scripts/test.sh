#!/bin/bash
# Run every check there is: lint, types, import contracts, unit tests, and the tests on a real cluster (Slurm,
# Apptainer, registry), which this script brings up and takes down. CONTRIBUTING.md says how long they take.
#
#   ./scripts/test.sh [--no-cluster] [--newest] [PYTEST OPTIONS]
#
#   --no-cluster   leave the real cluster out
#   --newest       with the newest packages of your index instead of the locked ones, and say what moved
#
# Needs Debian with Python 3.11, and root. Installs what its tests need, with apt and pip as they are configured.
# Status: 0 all tests ran and passed, but for long ones (HPCENV_TEST_LONG=1) and those that tests/not_here.toml lists;
# 1 something failed; 3 nothing failed, but other tests did not run, as the last lines say.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$here" || exit 1
cluster=1 newest=0 up='' began=$SECONDS failed=() not_run=() notes=()
while :; do
  case ${1:-} in
    --no-cluster) cluster=0 notes+=("left out: tests/cluster, because of --no-cluster") ;;
    --newest) newest=1 ;;
    *) break ;;
  esac
  shift
done
options=("$@")
python=${PYTHON:-python3}
venv=${HPCENV_TEST_VENV:-$here/.venv}
logs=$(mktemp -d)
# A testbed for each of two processes: some tests break theirs. The first is the one that `scripts/testbed` takes here.
first=${HPCENV_TESTBED_INSTANCE:-$(printf %s "$here" | sha256sum | cut -c 1-8)}
export HPCENV_TEST_TESTBEDS="$first ${first:0:9}b" PATH=$venv/bin:$PATH
export HPCENV_TEST_TORCH_PYTHON=$venv/bin/python HPCENV_TEST_HUB_PYTHON=$venv/hub/bin/python

check() { # NAME COMMAND...: its output is shown, its failure is kept
  printf '\n[%4d s] == %s\n' $((SECONDS - began)) "$1"
  "${@:2}"
  local status=$?
  # 5 of pytest: its options chose no test of this stage.
  [ $status -ne 5 ] || [ ${#options[@]} -eq 0 ] || return 0
  [ $status -eq 0 ] || failed+=("$1 (status $status)")
}
tests() { check "$1" env HPCENV_TEST_ACCOUNT="$logs/$1.account" "${@:2}" "${options[@]}"; }
testbeds() { for name in $HPCENV_TEST_TESTBEDS; do scripts/testbed --instance "$name" "$@" || return; done; }

end() { # always: take down, say what became of it, and end with the status
  trap : INT TERM # a second signal would leave the testbeds up
  [ ! -e "/proc/${up:-none}" ] || xargs kill "$up" <"/proc/$up/task/$up/children"
  [ -z "$up" ] || { wait "$up"; check "testbeds down" testbeds down; }
  count() { cat "$logs"/*.account 2>/dev/null | awk -v "word=$1" '$2 == word { sum += $1 } END { print sum + 0 }'; }
  printf '\n%s tests ran; %s are long (HPCENV_TEST_LONG=1); %s cannot run on this machine (tests/not_here.toml)\n' \
    "$(count ran)" "$(count long)" "$(count listed)"
  mapfile -t -O ${#not_run[@]} not_run < <(sed -n 's/^UNLISTED //p' "$logs"/*.account 2>/dev/null)
  rm -rf "$logs"
  [ ${#notes[@]} -eq 0 ] || printf '%s\n' "${notes[@]}"
  [ ${#not_run[@]} -eq 0 ] || printf 'NOT RUN: %s\n' "${not_run[@]}"
  [ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" && exit 1; }
  [ ${#not_run[@]} -eq 0 ] || exit 3
  echo "all checks passed in $((SECONDS - began)) s" && exit 0
}
trap end EXIT
trap 'failed+=("interrupted") && exit' INT TERM

apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >/dev/null; }
mapfile -t lacking < <(grep -v '^#' tests/packages/debian.txt | while read -r p; do dpkg -s "$p" &>/dev/null || echo "$p"; done)
[ ${#lacking[@]} -eq 0 ] || apt update
for one in "${lacking[@]}"; do
  apt install --no-install-recommends "$one" || not_run+=("what needs $one: apt-get cannot install it")
done
[ "$(id -u)" -eq 0 ] || [ $cluster -eq 0 ] || { cluster=0 && not_run+=("tests/cluster: the testbed needs root"); }

install() { # FOLDER: what it locks; torch, whose build depends on the index; this checkout
  for name in "$venv/hub:hub" "$venv:python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; do
    [ -x "${name%:*}/bin/python" ] || "$python" -m venv "${name%:*}" || return
    "${name%:*}/bin/python" -m pip install -q --require-hashes -r "$1/${name#*:}.txt" || return
  done
  pip install -q torch==2.13.0 && pip install -q --no-deps --no-build-isolation -e .
}
printf '== packages\n'
install tests/packages || { not_run+=("all: pip cannot install what tests/packages locks") && exit; }
if [ $newest -eq 1 ]; then
  export HPCENV_TEST_PACKAGES=$logs/packages
  mapfile -t -O ${#notes[@]} notes < <(scripts/lock-test-packages --upgrade "$HPCENV_TEST_PACKAGES")
  install "$HPCENV_TEST_PACKAGES" || { not_run+=("all: pip cannot install the newest packages") && exit; }
fi
if [ $cluster -eq 1 ]; then testbeds up --modules lmod &>"$logs/up" & up=$!; fi
check "lint" ruff check .
check "format" ruff format --check .
check "types" mypy
check "types of the testbed" mypy --strict --python-version 3.11 scripts/_testbed
# A file's tests stay in one process: they share what is slow to make.
tests "unit tests" pytest -q tests --ignore tests/cluster -n 2 --dist loadfile --no-loadscope-reorder
mapfile -t files < <(grep -rl --include='test_*.py' mark.ordinary_user tests)
[ "$(id -u)" -ne 0 ] || tests "tests as an ordinary user" \
  unshare --user --map-user=65534 --map-group=65534 pytest -q -m ordinary_user "${files[@]}"
[ $cluster -eq 1 ] || exit
wait "$up" || { not_run+=("tests/cluster: $(tail -n 5 "$logs/up")") && exit; }
tests "tests on a real cluster" pytest -q tests/cluster -n 2 --dist loadfile
notes+=("$(scripts/testbed --instance "$first" exec -- sh -c 'scontrol --version; apptainer --version')")
