"""Start and watch training runs of verl: jobs, folders, logs, clusters and sweeps."""
