"""The page of `hpcenv --help`.

The page is printed without click, because the import of click alone takes four times as long as the start of Python.
"""

from __future__ import annotations

# Task of the user -> name of a command -> its one-line help.
TASKS = {
    "Start with": {
        "doctor": "Say what this cluster is like, and write its site profile.",
        "init": "Write a commented hpcenv.toml.",
        "lock": "Resolve the environment and write its lockfile.",
        "submit": "Submit a script; all nodes run it in the locked environment.",
    },
    "Look at runs": {
        "status": "Say what a run is doing.",
        "list": "List the runs, the newest first.",
        "top": "Show what GPUs and ranks of a run do now, and what is odd.",
        "stacks": "Say on which line each rank of a running run is.",
        "logs": "Print the log of a run; with -f, also new lines.",
        "report": "Show how a run ended, with its verdict.",
        "diagnose": "Name the cause of a failure, from the logs.",
        "usage": "Sum GPU hours, idle hours and energy of the runs.",
    },
    "Act on runs": {
        "run": "Run any command in the locked environment, after the check.",
        "shell": "Open a shell in the locked environment, in a new job.",
        "session": "Work in a job: ssh, editors, web pages in the locked environment.",
        "attach": "Open a shell in a running run, on one of its nodes.",
        "wait": "Wait until runs end; the exit status says whether all ended well.",
        "cancel": "End runs.",
        "rerun": "Submit a run again, with the same inputs or changed flags.",
        "clean": "Remove old run folders, after listing them and asking you.",
    },
    "Reproduce": {
        "bundle": "Make an archive of a run; verify or unpack an archive.",
        "reproduce": "Repeat a run of somebody else, and compare the results.",
        "compare": "Say whether two runs gave the same results.",
        "diff": "Say what differs between lockfiles and runs.",
    },
    "Environment": {
        "verify": "Compare an environment, a SIF or nodes with the lockfile.",
        "explain": "Say what a field is, where it comes from and why it matters.",
        "export": "Write the lockfile in another tool's format.",
        "image": "Convert, keep, verify and make images.",
        "kernel": "Install a Jupyter kernel that starts in the locked environment.",
        "data": "Fetch models and data sets of a hub, for nodes without network.",
    },
    "Cluster": {
        "site": "Say which settings a site profile gives to a run, with sources.",
        "compat": "Say which torch, CUDA, driver, GPU and Python run together.",
        "net": "Explain and compare the network settings of runs.",
    },
    "Shell": {"completion": "Print the script for completion in bash, zsh or fish."},
}
VERBS = {name: text for verbs in TASKS.values() for name, text in verbs.items()}


def page() -> str:
    """Return the help of `hpcenv`."""
    width = max(map(len, VERBS))
    tasks = "\n\n".join(
        f"{task}:\n" + "\n".join(f"  {name:{width}}  {text}" for name, text in verbs.items())
        for task, verbs in TASKS.items()
    )
    return f"""\
Usage: hpcenv [OPTIONS] COMMAND [ARGS]...

  Submit to Slurm, and know that every node runs the locked environment.

{tasks}

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

`hpcenv COMMAND --help` says more. Exit statuses: docs/reference/errors.md"""
