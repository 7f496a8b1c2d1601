"""A profiler trace of a few steps, for `--profile`."""

import jax

from train.run import Run
from train.terminal import Terminal

# Counted from the first step of this start: late enough that nothing compiles.
_FIRST, _LAST = 5, 9


class Profile:
    """Traces steps 5 to 9 of this start into `profile/` of the run, if the configuration asks for it."""

    def __init__(self, run: Run, terminal: Terminal):
        self._directory, self._terminal = run.directory / "profile", terminal
        self._wanted, self._start, self._running = run.config.profile, run.start, False

    def before(self, step: int) -> None:
        """Called before each step is begun."""
        if not self._wanted:
            return
        number = step - self._start
        if number == _FIRST:
            jax.profiler.start_trace(str(self._directory))
            self._running = True
        elif number > _LAST:
            self.close()

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = self._wanted = False
            self._terminal.say(f"profile: {self._directory} (open with xprof or TensorBoard)")
