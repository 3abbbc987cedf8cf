"""The results of a run, and whether other runs give the same results: records, comparison, reproduction, reports."""
