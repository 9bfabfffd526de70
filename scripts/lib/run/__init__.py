"""One training run of verl: its job, its folder, its log, the cluster that it runs on, and sweeps of runs."""
