"""Read what a project folder defines: hpcenv.toml, lockfiles, fields and their severities, site profiles.

Runs on: LOGIN NODE.
"""
