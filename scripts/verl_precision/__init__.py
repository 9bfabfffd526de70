"""Code of the commands in scripts/, one package per topic. Neither recipes nor verl import it."""
