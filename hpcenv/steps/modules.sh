# shellcheck shell=bash
# Load the environment modules of a site profile, and record what each one sets for the ranks.
#
#     . modules.sh [--use FOLDER]... NAME...
#
# Runs on: COMPUTE NODE (the batch node), and where the user types `hpcenv run`. Another script sources this file,
# because `module` is a shell function, and only a shell itself can change its environment. This file uses $run, $python
# and `end` of the other script.

module_failed() {
  echo "error[nodes-unknown]: node ${SLURMD_NODENAME:-$(uname -n)} $1" >&2
  echo "hint: look at \`modules\` in the site profile; --site none submits without it" >&2
  end 91
}

# The environment at one moment. A variable keeps the environment, and a pipe passes it to the step. It is never written
# to a file, because it may contain credentials.
seen=''
see() { seen+="$1 $(env -0 | base64 -w 0)"$'\n'; }

# The shell code of the site does not expect `set -u`.
set +u
for definition in "${LMOD_PKG:-/nonexistent}/init/bash" "${MODULESHOME:-/nonexistent}/init/bash" \
  /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh; do
  type module >/dev/null 2>&1 && break
  if [ -r "$definition" ]; then . "$definition"; fi
done
type module >/dev/null 2>&1 || module_failed "has no command \`module\`"
while [ "${1:-}" = --use ]; do
  module use "$2" || module_failed "cannot use the folder of modules $2"
  shift 2
done
for name in "$@"; do
  case ":${LOADEDMODULES:-}:" in
    *":$name:"* | *":$name/"*) module unload "$name" 2>/dev/null ;; # its effect is seen only if it is loaded again
  esac
  see "before $name"
  module load "$name" || module_failed "cannot load the module $name"
  see "after $name"
done
printf '%s' "$seen" | "$python" -I "$run/code/step.py" modules "$run" || end 91
unset -v seen name definition
set -u
