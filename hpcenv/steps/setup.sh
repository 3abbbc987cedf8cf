# shellcheck shell=bash
# Run the lines of `setup`, of a site profile and of hpcenv.toml, in the shell of the batch script.
#
#     . setup.sh LINE...
#
# Runs on: COMPUTE NODE (the batch node). It is sourced, so what a line exports or limits holds for all steps of the
# job. A line that fails ends the job. It uses `stop_if_asked` and `end` of the script that sources it.

# A line must not change what the script itself uses.
readonly run python

setup_failed() {
  trap - EXIT
  stop_if_asked # a line that a signal of Slurm has ended has not failed
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
