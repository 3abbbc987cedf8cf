"""One file = one verb = one function = one command of the CLI.

Runs on: LOGIN NODE. Verbs take plain values, return frozen results and raise
`HpcenvError`; they never print, never exit and never read the environment themselves.
`workspace` and `runs` are the two nouns among them: the project folder and its runs.
"""
