"""Folders of this project."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"
CACHE = REPO / ".cache"  # wheels, made models and data
ARITHMETIC = CACHE / "addition"  # model and data of the sanity task
