"""`hpcenv image`: one file per verb."""
