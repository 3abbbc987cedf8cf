"""The testbed: a real Slurm cluster with Apptainer on one Debian machine.

Runs on: a developer's or CI's machine, as root. `cli` holds the words; the order in which
a cluster comes to life is `cluster.up`, and everything else is one noun per module:
`rootfs`, `image`, `hostenv`, `frameworks`, `wheel` (what is built and cached), `network`,
`cgroup`, `machine`, `slurm`, `job` (what runs), `fault` and `flaky` (what is broken on
purpose), `cleanup` (what `down` removes).
"""
