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
cd -P "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
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
[ $# -eq 0 ] || notes+=("only the tests that these options choose: $*")
python=${PYTHON:-python3}
lock=$("$python" -c 'import sys; print("python%d.%d.txt" % sys.version_info[:2])')
venv=${HPCENV_TEST_VENV:-$PWD/.venv}
logs=$(mktemp -d)
# A testbed for each of two processes: some tests break theirs. The first is the one that `scripts/testbed` takes here.
first=${HPCENV_TESTBED_INSTANCE:-$(printf %s "$PWD" | sha256sum | cut -c 1-8)}
export HPCENV_TEST_TESTBEDS="$first ${first:0:9}b" PATH=$venv/bin:$PATH DS_BUILD_OPS=0 DEBIAN_FRONTEND=noninteractive
export HPCENV_TEST_TORCH_PYTHON=$venv/bin/python
for one in hub frameworks hydra exports ray sessions trackers; do export "HPCENV_TEST_${one^^}_PYTHON=$venv/$one/bin/python"; done

check() { # NAME COMMAND...: its output is shown, its failure is kept
  printf '\n[%4d s] == %s\n' $((SECONDS - began)) "$1"
  "${@:2}" && return
  local status=$?
  [ $status -ne 5 ] || [ ${#options[@]} -eq 0 ] || return 0 # pytest: its options chose no test of this stage
  failed+=("$1 (status $status)") && return $status
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

apt() { apt-get -qq -o DPkg::Lock::Timeout=120 -o APT::Install-Recommends=0 "$@" >/dev/null </dev/null; }
while read -r one; do
  [ "$(dpkg-query -Wf '${db:Status-Status}' "$one" 2>/dev/null)" = installed ] || apt install "$one" ||
    { apt update && apt install "$one"; } || not_run+=("what needs $one: apt-get cannot install it")
done < <(grep -v '^#' tests/packages/debian.txt)
[ "$(id -u)" -eq 0 ] || [ $cluster -eq 0 ] || { cluster=0 && not_run+=("tests/cluster: the testbed needs root"); }

environment() { # FOLDER LOCK [PACKAGE]: by the locked pip, for older ones cannot lock a build; others need PACKAGE first
  [ -x "$1/bin/python" ] || "$python" -m venv "$1" || return
  [ $# -eq 2 ] || "$venv/bin/pip" --python "$1/bin/python" install -qq "$3" || return
  PIP_BUILD_CONSTRAINT=$2 "$venv/bin/pip" --python "$1/bin/python" install -qq --require-hashes -r "$2"
}
install() { # FOLDER: what it locks; torch, whose build depends on the index; this checkout
  environment "$venv" "$1/$lock" torch==2.13.0 && pip install -qq --no-deps --no-build-isolation -e . || return
  for one in hub hydra exports sessions ${HPCENV_TEST_LONG:+trackers}; do environment "$venv/$one" "$1/$one.txt" || return; done
  for one in ${HPCENV_TEST_LONG:+frameworks ray}; do environment "$venv/$one" "$1/$one.txt" torch==2.13.0 || return; done
}
check "packages" install "$PWD/tests/packages" || exit
if [ $newest -eq 1 ]; then
  export HPCENV_TEST_PACKAGES=$logs/packages
  mapfile -t -O ${#notes[@]} notes < <(scripts/lock-test-packages --upgrade "$HPCENV_TEST_PACKAGES")
  check "the newest packages" install "$HPCENV_TEST_PACKAGES" || exit
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
