# shellcheck shell=bash
# Run the lines of `setup` in the shell of the batch script. The lines are from a site profile and from hpcenv.toml.
#
#     . setup.sh LINE...
#
# Runs on: COMPUTE NODE (the batch node). The batch script sources this file, so the variables and limits that a line
# sets apply to all steps of the job. A line that fails ends the job. This file uses `stop_if_asked` and `end` of the
# batch script.

# A line must not change the variables that the script itself uses.
readonly run python

setup_failed() {
  trap - EXIT
  stop_if_asked # if a signal of Slurm ended the line, the line has not failed
  echo "error[setup-failed]: node ${SLURMD_NODENAME:-$(uname -n)}: a line of \`setup\` ended with status $1: $line" >&2
  echo "hint: correct \`setup\` under [submit] of hpcenv.toml or of the site profile;" >&2
  echo "        \`|| true\` at the end of a line lets this line fail" >&2
  end 94
}

# A line may call `exit`, `return` or `set`.
trap 'setup_failed $?' EXIT
set +u
for line in "$@"; do
  . <(printf '%s\n' "$line") || setup_failed $?
done
set -u +e
trap - EXIT
unset -v line
