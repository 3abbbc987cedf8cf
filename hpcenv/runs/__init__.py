"""Find runs and follow them (state, logs, wait, cancel, report, clean), and list and prune the image store.

Runs on: LOGIN NODE.
"""
