"""The version, in one place; imports nothing."""

VERSION = "0.1.0"
