"""What a run gave, and whether another run gives the same: record, comparison, reproduction, report."""
