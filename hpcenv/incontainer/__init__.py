"""Programs that run alone inside the image: each file is stdlib only, for Python 3.8 to 3.14, and imports nothing of hpcenv.

Runs on: inside the image.
"""
