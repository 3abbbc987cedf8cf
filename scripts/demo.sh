#!/bin/bash
# The whole way on this machine, without Slurm, container or root: lock this Python
# environment, check two emulated nodes against it, train on them, report; then change
# a file of the environment, and see the next run refused.
#
#   ./scripts/demo.sh [FOLDER]        FOLDER (default ./demo) keeps environment and project
#
# torch comes through pip as you have configured it. Its default build for Linux brings
# several GB of CUDA libraries; if you have an index with CPU builds, point pip at it
# (PIP_INDEX_URL, PIP_FIND_LINKS or pip.conf) before the first run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$here/demo}
python=${PYTHON:-python3}
# A release with builds for Python 3.10 to 3.14; a lockfile would pin it, this is the demo.
torch=${HPCENV_DEMO_TORCH:-torch==2.13.0}

say() { printf '\n== %s\n' "$*"; }

show() {
  printf '$ %s\n' "$*"
  "$@"
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "demo: $python is older than Python 3.10; set PYTHON=/path/to/python3" >&2
  exit 2
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "demo: $python has no venv module; on Debian: apt install python3-venv" >&2
  exit 2
fi

say "an environment with hpcenv and $torch in $folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[ -x "$folder/venv/bin/python" ] || "$python" -m venv "$folder/venv"
# The versions of hpcenv's own tests, where they are locked for this Python. Without the hashes: torch is not locked,
# because its build depends on the index, and with them pip would refuse it.
versions=$folder/versions.txt
locked=$here/tests/packages/python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
if [ -e "$locked" ]; then sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' "$locked"; fi >"$versions"
# The second variable is for what a build needs; pip before 25.3 takes the first one for it, too.
PIP_CONSTRAINT=$versions PIP_BUILD_CONSTRAINT=$versions \
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$here" "$torch" numpy
PATH=$folder/venv/bin:$PATH
export VIRTUAL_ENV=$folder/venv

say "a project"
mkdir -p "$folder/project"
cp -r "$here/examples" "$folder/project/"
cd "$folder/project"
[ -e hpcenv.toml ] || show hpcenv init

say "lock what this environment is"
show hpcenv lock

say "train on 2 emulated nodes, each checked against the lockfile first"
run=demo-$(date +%Y%m%d-%H%M%S)
train() { # NAME; the project is a copy in a folder that git ignores: there is no commit to take the code from
  show hpcenv submit examples/train.py --cluster local --nodes 2 --gpus 0 --nproc 1 \
    --name "$1" --workdir live --wait -- --steps 60
}
train "$run"

say "what became of it"
show hpcenv report "$run" --lines 1

say "see it refuse: a line is added to a file of an installed package"
file=$("$folder/venv/bin/python" -c 'import numpy.version; print(numpy.version.__file__)')
cp -p "$file" "$folder/version.py"
trap 'mv "$folder/version.py" "$file"' EXIT
echo '$ echo "# edited" >> .../numpy/version.py'
echo "# edited" >>"$file"
status=0
train "$run-edited" || status=$?
if [ $status -ne 90 ]; then
  echo "demo: the run should have been refused with status 90, and ended with $status" >&2
  exit 1
fi

say "done: the file is as before. On your cluster, in your project's folder"
cat <<'END'
next: hpcenv doctor
      hpcenv init --image docker://REGISTRY/OWNER/NAME:TAG
      hpcenv lock
      hpcenv submit train.py --nodes 2 --gpus 8
      README.md says how to install hpcenv there.
END
