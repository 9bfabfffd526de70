"""Make verl train and roll out in the same 16 bits. Neither the recipes nor the patched verl import this package."""

__version__ = "0.1.0"
