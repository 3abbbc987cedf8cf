"""What a project folder says: hpcenv.toml, lockfiles, fields and their severities, site profiles.

Runs on: LOGIN NODE.
"""
