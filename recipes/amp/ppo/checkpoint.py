"""Save and resume a run: the trainer's checkpoint, with progress and provenance."""

from dataclasses import asdict
from pathlib import Path

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.provenance import provenance

PROGRESS = ("device", "updates", "episodes", "returns", "generator")  # of a run, in its checkpoint
MAY_CHANGE = ("out", "resume", "total_steps", "stop_at", "eval_episodes", "save_every")
MAY_CHANGE += ("device", "compile", "use_amp", "dtype", "loss_scale", "vectorize")


class ResumeError(ValueError):
    """Files from which a run cannot be resumed; the message is one line."""


def save_checkpoint(ppo: PPO, path: Path) -> None:
    """Write a checkpoint that :func:`resume` continues from."""
    progress = (ppo.device.type, ppo.updates, ppo.episodes, list(ppo.returns), ppo.generator.get_state())
    ppo.trainer.save_checkpoint(path, {**provenance(ppo), **dict(zip(PROGRESS, progress, strict=True))})


def resume(ppo: PPO, path: Path) -> str:
    """Load networks, Adam, loss scale, counters and random numbers; the environments start anew.

    Returns:
        the dtype that the checkpoint was trained in.

    Raises:
        ResumeError: there is none, or it is another recipe's, was made with settings that may not change, or on another
            kind of device.
        InvalidCheckpointError: truncated, from a newer version, or of another model.
    """
    if not path.exists():
        raise ResumeError(f"{path}: there is no checkpoint to resume from; leave out --resume")
    saved = read_checkpoint(path)["extra"]
    if saved.get("recipe") != "ppo" or not {"config", "precision", *PROGRESS} <= saved.keys():
        raise ResumeError(f"{path}: not a checkpoint of PPO")
    for key, value in asdict(ppo.config).items():
        if key not in MAY_CHANGE and saved["config"].get(key) != value:
            raise ResumeError(f"{path}: made with {key}={saved['config'].get(key)}, not {value}; resume with that")
    made_on, updates, episodes, returns, generator = (saved[name] for name in PROGRESS)
    if made_on != ppo.device.type:  # whose random numbers are others
        raise ResumeError(f"{path}: made on {made_on}, not {ppo.device.type}; resume with --device {made_on}")
    ppo.trainer.load_checkpoint(path)
    ppo.updates, ppo.episodes = updates, episodes
    ppo.returns.extend(returns)
    ppo.generator.set_state(generator.cpu())
    ppo.restart_environments()
    return saved["precision"]["effective_dtype"]
