"""The version of hpcenv. This module imports nothing."""

VERSION = "0.1.0"
