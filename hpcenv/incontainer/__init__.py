"""Programs that run inside the image. They need only the standard library of Python 3.8 to 3.14.

Runs on: inside the image.
"""
