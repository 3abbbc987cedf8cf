"""Make, verify and unpack a bundle: one archive with a run, for a data repository."""
