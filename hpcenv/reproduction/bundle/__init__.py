"""A run as one archive for a data repository: made, verified, unpacked."""
