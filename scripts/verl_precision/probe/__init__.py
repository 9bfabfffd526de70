"""Measure a model before training: the mismatch of trainer and rollout, and whether its values fit fp16."""
