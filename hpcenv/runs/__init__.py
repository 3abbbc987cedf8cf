"""Find runs and follow them: state, logs, wait, cancel, report, clean; the store's listing and prune.

Runs on: LOGIN NODE.
"""
