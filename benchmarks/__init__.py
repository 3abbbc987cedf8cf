"""Measurements of hpcenv beside its peers: `python -m benchmarks.NAME [--json]`.

Runs on: any machine, outside the test command. Each module measures ours and the peer alternately in one run. With
`--json` its last line is one object with the keys `name`, `ours_s`, `peer_s`, `ratio`, `must`.
"""
