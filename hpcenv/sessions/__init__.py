"""Sessions: a shell, ssh and web pages in the environment of a run, through steps of its job.

Runs on: COMPUTE NODE; `ssh` also on the login node. Standard library only.
"""
