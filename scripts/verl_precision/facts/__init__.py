"""Facts that several rooms ask for: where packages are, names of dtypes and metrics, GPUs, models, configurations."""
