"""What every lewm environment adds to Gymnasium's API.

Collecting and evaluating need more than ``reset`` and ``step``: they put a world into a recorded state, ask whether a
state counts as the goal, and draw frames of states that the world is not in. Collecting also needs an ``Expert``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from lewm.envs.quantities import Quantity, plain_quantities
from lewm.errors import EnvError, unknown_name
from lewm.types import Array

ObsType = Literal["pixels", "state"]
Colour = tuple[int, int, int]  # red, green, blue, 0 to 255


@dataclass(frozen=True)
class Intervention:
    """Something that the world's own physics cannot explain, to see whether a model is surprised by it.

    step: how many actions come before it, at least 1: frame ``step`` is the first to show it (``reset`` gives frame 0).
    object: one of the environment's ``objects``.
    colour: drawn in it from then on.
    position: moved there at once, in the units of the state and with as many numbers as the environment's docstring
        says. At least one of ``colour`` and ``position`` is given.
    """

    step: int
    object: str
    colour: Colour | None = None
    position: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.step < 1:
            raise EnvError(f"An intervention follows at least one action; its step must be 1 or more, got {self.step}.")
        if self.colour is None and self.position is None:
            raise EnvError("An intervention changes something: give its colour, its position, or both.")


class WorldEnv(gymnasium.Env[Array, Array]):
    """A world with a state that can be read, set and drawn, and a goal that is one of its states.

    A subclass gives ``state_names``, ``proprio_names`` (those of them that the agent senses of itself), ``objects``
    (the names of what interventions may change), ``quantities`` (what the state's numbers are, for probes), a float64
    ``state_space`` and a float32 ``action_space``, and implements the abstract methods; checking, clipping, observing
    and rewarding happen here, once.

    ## Arguments
    * ``resolution``: frames are (resolution, resolution, 3).
    * ``obs_type``: "pixels" observes frames; "state" the state, for callers that draw only the frames they need.
    * ``render_mode``: only "rgb_array"; ``render`` returns a frame in any case.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's)
    state_names: ClassVar[tuple[str, ...]]
    proprio_names: ClassVar[tuple[str, ...]] = ()
    objects: ClassVar[tuple[str, ...]] = ()
    quantities: ClassVar[tuple[Quantity, ...]] = ()
    action_space: Box

    def __init__(
        self, state_space: Box, action_space: Box, resolution: int, obs_type: ObsType, render_mode: str | None
    ) -> None:
        if resolution < 1:
            raise EnvError(f"resolution must be a positive number of pixels, got {resolution}.")
        if obs_type not in ("pixels", "state"):
            raise EnvError(unknown_name("obs_type", str(obs_type), ("pixels", "state")))
        if render_mode not in (None, "rgb_array"):
            raise EnvError(unknown_name("render_mode", str(render_mode), ("rgb_array",)))
        self.state_space, self.action_space = state_space, action_space
        self.resolution, self.obs_type, self.render_mode = resolution, obs_type, render_mode
        frame_space = Box(0, 255, (resolution, resolution, 3), np.uint8)
        self.observation_space = frame_space if obs_type == "pixels" else state_space
        self._goal: Array | None = None
        self._interventions: tuple[Intervention, ...] = ()
        self._steps = 0

    @property
    @abstractmethod
    def state(self) -> Array:
        """A copy of the current state, float64 (state_dim,); ``set_state`` restores it exactly."""

    @abstractmethod
    def is_success(self, state: Array, goal: Array) -> Array:
        """Whether states count as goals: (..., state_dim) twice in, bool (...) out. Pure."""

    @abstractmethod
    def render(self) -> Array:
        """The current state as a frame, uint8 (R, R, 3)."""

    @abstractmethod
    def _restore(self, state: Array) -> None:
        """Put the world into ``state``, which has been checked."""

    @abstractmethod
    def _advance(self, action: Array) -> None:
        """Apply one action, which has been checked and clipped, float64 (action_dim,)."""

    @abstractmethod
    def _sample_start(self) -> Array:
        """A random initial state (state_dim,), drawn with ``self.np_random``."""

    @abstractmethod
    def _sample_goal(self, start: Array) -> Array:
        """A random goal (state_dim,) for an episode that begins in ``start``."""

    def _paint(self, name: str, colour: Colour | None) -> None:
        """Draw one of ``objects`` in ``colour`` from now on; None: in its own."""
        raise NotImplementedError(f"{type(self).__name__} has objects, so it has to implement _paint.")

    def _moved(self, state: Array, name: str, position: Array) -> Array:
        """``state`` (state_dim,) with one of ``objects`` at ``position``, whose size is to be checked. Pure."""
        raise NotImplementedError(f"{type(self).__name__} has objects, so it has to implement _moved.")

    def paint(self, name: str, colour: Colour | None) -> None:
        """Draw one of ``objects`` in ``colour`` until the next ``reset``; None: in its own."""
        self._check_object(name)
        if colour is not None and (len(colour) != 3 or not all(0 <= channel <= 255 for channel in colour)):
            raise EnvError(f"A colour is three numbers from 0 to 255, got {colour}.")
        self._paint(name, colour)

    def teleport(self, name: str, position: Array | tuple[float, ...]) -> None:
        """Put one of ``objects`` to ``position`` at once, all else unchanged."""
        self._check_object(name)
        self.set_state(self._moved(self.state, name, np.asarray(position, np.float64)))

    def schedule(self, *interventions: Intervention) -> None:
        """Let these interventions happen in the running episode, in place of any scheduled before."""
        for intervention in interventions:
            self._check_object(intervention.object)
        self._interventions = interventions

    def _check_object(self, name: str) -> None:
        if name not in self.objects:
            raise EnvError(unknown_name(f"object of {type(self).__name__}", name, self.objects))

    def _intervene(self) -> None:
        """Apply what is scheduled for the current step."""
        for intervention in self._interventions:
            if intervention.step == self._steps:
                if intervention.colour is not None:
                    self.paint(intervention.object, intervention.colour)
                if intervention.position is not None:
                    self.teleport(intervention.object, intervention.position)

    @classmethod
    def proprio(cls, states: Array) -> Array:
        """What the agent senses of itself in states (..., state_dim), without the world around it: (..., P). Pure."""
        return np.asarray(states)[..., [cls.state_names.index(name) for name in cls.proprio_names]]

    @classmethod
    def probed(cls) -> tuple[Quantity, ...]:
        """What probes ask for: ``quantities``, or each number of the state by itself where there are none."""
        return cls.quantities or plain_quantities(cls.state_names)

    @classmethod
    def visible(cls, states: Array) -> Array:
        """Whether frames show what matters of states (..., state_dim): bool (...). Here all do. Pure."""
        return np.ones(np.asarray(states).shape[:-1], bool)

    def set_state(self, state: Array) -> None:
        """Put the world into a state (state_dim,), as one that ``state`` returned."""
        self._restore(self._checked(state, "state"))

    @property
    def goal(self) -> Array:
        """A copy of the goal, float64 (state_dim,)."""
        if self._goal is None:
            raise EnvError(f"{type(self).__name__} has no goal yet: call reset() or set_goal() first.")
        return self._goal.copy()

    def set_goal(self, state: Array) -> None:
        """Make a state (state_dim,) the one to reach."""
        self._goal = self._checked(state, "goal")

    def goal_reached(self) -> bool:
        """Whether the current state counts as the goal."""
        return bool(self.is_success(self.state, self.goal))

    def render_states(self, states: Array) -> Array:
        """Draw states (N, state_dim) as frames, uint8 (N, R, R, 3); the current state stays as it is."""
        return self._draw_states(self._checked(states, "states", len(states)))

    def _draw_states(self, states: Array) -> Array:
        """``render_states`` of checked states; to be replaced where drawing needs no setting."""
        frames = np.empty((len(states), self.resolution, self.resolution, 3), np.uint8)
        current = self.state
        for frame, state in zip(frames, states, strict=True):
            self._restore(state)
            frame[:] = self.render()
        self._restore(current)
        return frames

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin an episode, in its own colours. ``options`` may give its "state" and its "goal", each (state_dim,)."""
        options = options or {}
        for name in options.keys() - {"state", "goal"}:
            raise EnvError(unknown_name("reset option", name, ("state", "goal")))
        given = {name: self._checked(value, name) for name, value in options.items()}
        super().reset(seed=seed)
        self._interventions, self._steps = (), 0
        for name in self.objects:
            self._paint(name, None)
        # Drawn even when it is overridden, so that a seed's goal does not depend on which option was given.
        sampled = self._sample_start()
        start = given.get("state", sampled)
        goal = self._sample_goal(start)
        self._restore(start)
        self._goal = given.get("goal", goal)
        return self._observe()

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Apply one action (action_dim,), clipped to the action space. Reaching the goal earns 1 and ends."""
        low, high = self.action_space.low, self.action_space.high
        checked = _checked_array(action, low.shape, f"{type(self).__name__}'s action")
        _ = self.goal  # Raises where there is none, before anything moves.
        self._advance(np.clip(checked, low, high))
        self._steps += 1
        self._intervene()
        observation, info = self._observe()
        return observation, float(info["success"]), info["success"], False, info

    def _observe(self) -> tuple[Array, dict[str, Any]]:
        observation = self.render() if self.obs_type == "pixels" else self.state
        return observation, {"state": self.state, "success": self.goal_reached()}

    def _checked(self, states: Array, what: str, *leading: int) -> Array:
        """A float64 copy of ``states`` (*leading, state_dim), or an error that says what is wrong."""
        name = f"{type(self).__name__}'s {what} ({', '.join(self.state_names)})"
        low, high = self.state_space.low, self.state_space.high
        checked = _checked_array(states, (*leading, *low.shape), name)
        if (checked < low).any() or (checked > high).any():
            raise EnvError(f"{name} must lie between {low} and {high}, got {checked}.")
        return checked


class Expert(ABC):
    """A policy for one episode; it may remember what it did, so each episode gets its own.

    ``steps``: the episode has exactly so many actions; None: it ends at the goal, or after the environment's
    ``episode_steps``.
    """

    steps: int | None = None

    def begin(self, state: Array, goal: Array) -> tuple[Array, Array]:
        """Start and goal, (state_dim,) each, of an episode for which the environment has drawn these two."""
        return state, goal

    @abstractmethod
    def act(self, state: Array, goal: Array) -> Array:
        """An action (action_dim,) that leads from ``state`` towards ``goal``, both (state_dim,)."""


def _checked_array(values: Array, shape: tuple[int, ...], name: str) -> Array:
    """``values`` as a float64 copy of the given shape, or an error that calls it ``name``."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EnvError(f"{name} must be numbers of shape {shape}, got {values!r}.") from error
    if array.shape != shape:
        raise EnvError(f"{name} must have shape {shape}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise EnvError(f"{name} must be finite, got {array}.")
    return array
