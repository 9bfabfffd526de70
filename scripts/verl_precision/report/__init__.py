"""Compare runs: read their logs, compute statistics, write tables, figures and a page."""
