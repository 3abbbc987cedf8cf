"""One file = one outside tool: argv builders, output parsers and the call.

Runs on: LOGIN NODE; `process`, `apptainer` and `nvml` also on compute nodes.
"""
