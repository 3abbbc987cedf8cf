#!/bin/bash
# Run every check there is: lint, types, import contracts, unit tests, and the tests on a
# real cluster (Slurm, Apptainer, registry) that this script brings up and takes down.
#
#   ./scripts/test.sh [--no-cluster] [--keep] [PYTEST ARGUMENTS]
#
#   --no-cluster   leave the real cluster out (no root needed), and say so
#   --keep         leave the testbed up at the end
#
# Needs Debian with Python 3.11. As root it installs the missing Debian packages itself.
# Packages come through apt and pip as they are configured on this machine.
#
# The testbed is built while the rest is installed and checked. The unit tests run in two
# processes; the tests on the cluster, which wait for Slurm much of the time, run beside them,
# in two processes with a testbed each, because some of them break it. Each stage has a time
# limit and a file for its output, which is printed when the stage ends.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$here" || exit 1
cluster=1
keep=0
while [ $# -gt 0 ]; do
  case $1 in
    --no-cluster) cluster=0 ;;
    --keep) keep=1 ;;
    *) break ;;
  esac
  shift
done
venv=${HPCENV_TEST_VENV:-$here/.venv}
python=${PYTHON:-python3}
# All stages together, in seconds: a run in CI has 30 minutes, of which taking the testbed down needs some.
total=${HPCENV_TEST_SECONDS:-1700}
# The first is the one that `scripts/testbed` takes by itself in this checkout.
first=${HPCENV_TESTBED_INSTANCE:-$(printf %s "$here" | sha256sum | cut -c 1-8)}
testbeds=("$first" "${first:0:9}b")
logs=$(mktemp -d)
failed=()
notrun=()
unsteady=()
declare -A pid=() limit=()
began=$SECONDS

say() { printf '\n[%4d s] == %s\n' $((SECONDS - began)) "$*"; }

left() { # SECONDS: these, or what is left of all of them together
  local rest=$((total - SECONDS + began))
  [ "$rest" -gt 5 ] || rest=5
  echo $((rest < $1 ? rest : $1))
}

# In a stage of so many seconds no test begins later than this (seconds since the epoch): a slow machine then says what
# it did not get to. The last ones need their time, on a cluster up to 200 s.
until_before() { # SECONDS-OF-THE-STAGE SECONDS-FOR-THE-LAST
  echo $(($(date +%s) + $(left "$1") - $2))
}

# Run a command beside what follows, for so many seconds at most. It is interrupted before it is
# killed: pytest then says where it was, and its fixtures clean up. (Bash would make it deaf to SIGINT.)
start() { # NAME SECONDS COMMAND...
  local name=$1
  limit[$name]=$(left "$2")
  shift 2
  say "$name: started"
  (
    from=$SECONDS
    env --default-signal=INT timeout --signal=INT --kill-after=30 "${limit[$name]}" "$@" \
      >"$logs/$name" 2>&1 </dev/null &
    child=$!
    trap 'kill -INT "$child" 2>/dev/null' TERM
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do
      wait "$child"
      status=$?
    done
    echo "$status $((SECONDS - from))" >"$logs/$name.end"
  ) &
  pid[$name]=$!
}

finish() { # NAME: wait for it, print what it said; its status
  local name=$1 status=1 took=0 late
  wait "${pid[$name]}"
  unset "pid[$name]"
  read -r status took <"$logs/$name.end"
  say "$name: ended after $took s"
  cat "$logs/$name"
  late=$(sed -n 's/^SKIPPED \[\([0-9]*\)\].*HPCENV_TEST_SECONDS.*/\1/p' "$logs/$name")
  [ -z "$late" ] || notrun+=("$late of the $name: this machine took too long for the others")
  verdict "$name" "$status"
}

verdict() { # NAME STATUS
  case $2 in
    0) return 0 ;;
    124 | 137) failed+=("$1: not done within ${limit[$1]} s") ;;
    *) failed+=("$1") ;;
  esac
  return "$2"
}

# A test that fails beside three others on two cores may have met its own time limits only. What failed is run once more,
# alone, where it is little and there is time; that it passed only then is said at the end.
once_more() { # NAME STATUS COMMAND...: how the stage ended; the command that runs what had failed in it
  local name=$1 status=$2 count still=() before
  [ "$status" = 1 ] || return 0
  count=$(grep -cE '^(FAILED|ERROR) ' "$logs/$name")
  if [ "$count" -lt 1 ] || [ "$count" -gt 3 ] || [ "$(left 150)" -lt 150 ]; then return 0; fi
  check "$name once more" 600 "${@:3}" --last-failed --last-failed-no-failures none || return 0
  for before in "${failed[@]}"; do [ "$before" = "$name" ] || still+=("$before"); done
  failed=("${still[@]}")
  unsteady+=("$count of the $name failed, and passed when run once more, alone")
}

check() { # NAME SECONDS COMMAND...: run it now
  start "$@"
  finish "$1"
}

end_early() {
  local name
  for name in "${!pid[@]}"; do
    kill "${pid[$name]}" 2>/dev/null
    wait "${pid[$name]}" 2>/dev/null
    say "$name: ended before it was done; so far it said"
    cat "$logs/$name"
  done
}

take_down() {
  local name
  [ "$cluster" -eq 1 ] && [ "$keep" -eq 0 ] || return 0
  cluster=0
  total=$((total + 120))
  for name in "${testbeds[@]}"; do
    check "testbed down ($name)" 60 scripts/testbed --instance "$name" down
  done
}

clean_up() {
  # A second signal (from a terminal, or from a `timeout` around this) would leave the testbed up.
  trap : INT TERM
  # `up` may still be at work where something before it failed: `down` would find it locked.
  end_early
  take_down
  rm -rf "$logs"
}

lacking() { # PACKAGE...: those that are not installed
  local package
  for package in "$@"; do
    dpkg -s "$package" >/dev/null 2>&1 || echo "$package"
  done
}

apt() { # SECONDS WORD...
  local seconds=$1
  shift
  DEBIAN_FRONTEND=noninteractive check "apt-get $*" "$seconds" apt-get -qq -o DPkg::Lock::Timeout=120 "$@"
}

install_debian_packages() {
  local needed=() wanted=() package before=("${failed[@]}")
  # The rendered batch scripts are read by shellcheck, what is committed by git. The rest plays a
  # part in the tests of images: what these tools unpack, copy and pack is the yardstick.
  mapfile -t needed < <(lacking python3-venv git shellcheck)
  mapfile -t wanted < <(lacking umoci skopeo squashfs-tools)
  # Any C compiler makes the fake driver and the fake libraries.
  command -v cc >/dev/null || command -v gcc >/dev/null || wanted+=(gcc libc6-dev)
  [ ${#needed[@]} -eq 0 ] && [ ${#wanted[@]} -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    notrun+=("what needs the Debian packages ${needed[*]} ${wanted[*]}: they are missing and this is not root")
    return 0
  fi
  apt 200 update
  apt 300 install --no-install-recommends "${needed[@]}" "${wanted[@]}" || {
    for package in "${needed[@]}"; do apt 120 install --no-install-recommends "$package" || exit 2; done
    for package in "${wanted[@]}"; do
      apt 120 install --no-install-recommends "$package" || notrun+=("what needs $package: apt does not have it")
    done
  }
  # What apt could not do is judged above, by what it means.
  failed=("${before[@]}")
}

make_environment() {
  [ -x "$venv/bin/python" ] || check "virtual environment" 120 "$python" -m venv "$venv" || exit 2
  # torch 2.13.0 has a CPU build where pip is configured for one; the tests need no GPU.
  check "pip" 480 "$venv/bin/pip" install --quiet --disable-pip-version-check \
    -e '.[dev]' hatchling build torch==2.13.0 numpy || exit 2
}

trap clean_up EXIT
trap 'exit 130' INT TERM
install_debian_packages
if [ "$cluster" -eq 1 ] && [ "$(id -u)" -ne 0 ]; then
  cluster=0
  notrun+=("the tests on a real cluster: the testbed needs root")
fi
# shellcheck disable=SC2016
bring_up='for name; do scripts/testbed --instance "$name" up --modules lmod || exit; done'
[ "$cluster" -eq 1 ] && start "testbeds up" 900 bash -c "$bring_up" up "${testbeds[@]}"
make_environment
export PATH=$venv/bin:$PATH
export HPCENV_TEST_TORCH_PYTHON=$venv/bin/python

check "lint" 60 ruff check .
check "format" 60 ruff format --check .
check "types" 240 mypy
check "types of the testbed" 120 mypy --strict --python-version 3.11 scripts/_testbed
tests() { # NAME WORD...: pytest with what it remembers for this stage
  printf '%s\0' pytest -q -o "cache_dir=$logs/cache of the $1" "${@:2}"
}
mapfile -d '' unit < <(tests unit --timeout 240 tests --ignore tests/cluster "$@")
mapfile -d '' on_cluster < <(tests cluster --timeout 600 tests/cluster "$@")
# A file's tests stay in one process: they share what is slow to make.
start "unit tests" 1420 env HPCENV_TEST_UNTIL="$(until_before 1420 100)" "${unit[@]}" -n 2 --dist loadfile --no-loadscope-reorder
if [ "$cluster" -eq 1 ]; then
  if finish "testbeds up"; then
    export HPCENV_TEST_TESTBEDS=${testbeds[*]}
    start "tests on a real cluster" 1420 \
      env HPCENV_TEST_UNTIL="$(until_before 1420 200)" "${on_cluster[@]}" -n ${#testbeds[@]} --dist loadfile
  else
    notrun+=("tests/cluster: the testbed did not come up")
  fi
else
  notrun+=("tests/cluster: no testbed")
fi
unit_status=0 cluster_status=0
finish "unit tests" || unit_status=$?
[ -z "${pid["tests on a real cluster"]:-}" ] || finish "tests on a real cluster" || cluster_status=$?
once_more "unit tests" "$unit_status" "${unit[@]}"
once_more "tests on a real cluster" "$cluster_status" "${on_cluster[@]}"
take_down

say "result"
for what in "${notrun[@]}"; do echo "NOT RUN: $what"; done
for what in "${unsteady[@]}"; do echo "UNSTEADY: $what"; done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
[ $((${#notrun[@]} + ${#unsteady[@]})) -eq 0 ] || {
  echo "what was run passed, in $((SECONDS - began)) s"
  exit 0
}
echo "all checks passed in $((SECONDS - began)) s"
