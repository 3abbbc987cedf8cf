"""The results of a run, and whether another run gives the same results: record, comparison, reproduction, report."""
