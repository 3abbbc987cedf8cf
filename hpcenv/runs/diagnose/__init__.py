"""`hpcenv diagnose`: the earliest cause that the logs of a failed run show. Runs on: LOGIN NODE.

`patterns` has the texts that failed runs write, `scan` finds these texts in one log, `choose` separates the cause from
its consequences, and `diagnose` reads the logs of a run or the given files.
"""
