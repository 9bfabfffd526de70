"""Small Gymnasium environments, registered by name: shared by the tests of recipes/amp."""

import math

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Counter(gymnasium.Env):
    """Observes (step, last action) and ends at step 7; the reward is the step. Step 5 may be invalid."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, observed: float = 0.0, rewarded: float = 0.0):
        self.observed, self.rewarded = observed, rewarded

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.0, -1.0], np.float32), {}

    def step(self, action):
        self.count += 1
        spoilt = self.count == 5
        observation = np.array([self.count, action + self.observed if spoilt else action], np.float32)
        return observation, float(self.count + (self.rewarded if spoilt else 0.0)), self.count == 7, False, {}


class Restless(Counter):
    """Starts from an observation that no seed determines."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.random.rand(2).astype(np.float32), {}


class Hand(gymnasium.Env):
    """Episodes of three steps that terminate, and, alternately, of two that are cut off; step t is rewarded by t + 1.

    The observation is (t, whether the episode will be cut off).
    """

    observation_space = Box(0.0, 10.0, (2,))
    action_space = Discrete(2)
    cut_off = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cut_off = 0, not self.cut_off
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        terminated, truncated = not self.cut_off and self.t == 3, self.cut_off and self.t == 2
        return self._observation(), float(self.t), terminated, truncated, {}

    def _observation(self):
        return np.array([self.t, self.cut_off], dtype=np.float32)


class Shifted(Hand):
    """Observations are one of four that start at 3, actions one of three that start at 5."""

    observation_space = Discrete(4, start=3)
    action_space = Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._observation(), float(action), self.t == 3, False, {}

    def _observation(self):
        return 3 + self.t


class Broken(Hand):
    """Every second instance returns the given values at step 3, else valid ones; episodes do not end."""

    made = 0

    def __init__(self, shown: float = 0.0, rewarded: float = 0.0):
        Broken.made += 1
        self.breaks, self.shown, self.rewarded = Broken.made % 2 == 0, shown, rewarded

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        self.t += 1
        now = self.breaks and self.t == 3
        observation = np.full(2, self.shown if now else 0.0, dtype=np.float32)
        return observation, self.rewarded if now else 0.0, False, False, {}


class Lengths(Hand):
    """An episode's length is two to four steps, by its seed."""

    def reset(self, *, seed=None, options=None):
        self.t, self.length = 0, 2 + (seed or 0) % 3
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        return self._observation(), 1.0, self.t == self.length, False, {}


for environment in (Counter, Restless, Hand, Shifted, Lengths):
    gymnasium.register(f"{environment.__name__}-v0", environment)
for name, broken in {
    "Nan": {"shown": math.nan},
    "Large": {"shown": 1e5},
    "NanReward": {"rewarded": math.nan},
    "Endless": {},
}.items():
    gymnasium.register(f"{name}-v0", Broken, kwargs=broken)
