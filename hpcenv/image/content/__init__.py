"""What an image consists of: the members of a tar stream, and the tree of files that they make.

Runs on: LOGIN NODE.
"""
