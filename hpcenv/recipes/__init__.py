"""Dockerfile and definition templates, and the rules that check them.

Runs on: LOGIN NODE.
"""
