"""`hpcenv diagnose`: the earliest cause that the logs of a failed run show. Runs on: LOGIN NODE.

`patterns` knows what failed runs write, `scan` finds it in one log, `choose` tells the cause from its consequences, and
`diagnose` reads the logs of a run or the given files.
"""
