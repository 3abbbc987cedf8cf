"""The content of an image: the members of a tar stream, and the file tree that the members form.

Runs on: LOGIN NODE.
"""
