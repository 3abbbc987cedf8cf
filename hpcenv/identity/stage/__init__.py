"""Copies of the SIF and of data folders on the disks of the nodes."""
