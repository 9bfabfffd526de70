"""Run a whole OAT job on a CPU: ``python -m recipes.oat_cpu.run`` with OAT's arguments (docs/results/oat-cpu.md)."""

import launchpad

from recipes.oat_cpu.arithmetic import AdditionActor, AdditionLearner

# isort: split
from oat.algorithms.ppo import PPOArgs
from oat.args import default_args_validation, get_default_args
from oat.interface import get_program

if __name__ == "__main__":
    args = get_default_args(PPOArgs)
    args.algo = "PPO"
    args.online_evaluation = True  # passes the references to the actor's oracle
    args = default_args_validation(args)
    program, resources = get_program(args, learner_cls=AdditionLearner, actor_cls=AdditionActor)
    launchpad.launch(program, args.launch_type, local_resources=resources, terminal="current_terminal")
