"""Show the progress of a run on the terminal: its start-up, then a line a step."""

import json
import time
from pathlib import Path
from statistics import median

from verl_precision.facts.metrics import (
    FLOWRL,
    K3_KL,
    LAST,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SECONDS,
    SKIPPED,
    metric_total,
    metric_values,
    training_rows,
)
from verl_precision.format import duration, number

START_UP = {  # markers in verl's log, and what starts after each
    "ray init kwargs": "Ray and its workers",
    "worker group kwargs": "the trainer's model",
    "reward loop manager initialized": "vLLM",
    "all initialize finished": "the first step",
}
HEARTBEAT_S = 20
# How long main_ppo may continue after a death that may be harmless: minimum seconds, and multiple of the longest step.
LINGERS_S, LINGERS = 600, 3


class RunProgress:
    """Prints the progress of a run. ``data`` has its training steps; ``shown`` counts those of this attempt."""

    def __init__(self, out: Path, steps: int):
        self.out, self.steps = out, steps
        self.started = time.monotonic()

    def begin(self, earlier: list[dict]) -> None:
        """Start showing an attempt that continues after the steps whose metrics are ``earlier``."""
        self.data, self.shown, self.bytes_read = list(earlier), 0, 0
        self.start_phase("Python and verl")

    @property
    def finished(self) -> bool:
        return len(self.data) >= self.steps

    @property
    def patience(self) -> float:
        """Return the seconds without a further step after which a possibly harmless death ends the run."""
        return max([LINGERS_S, *(LINGERS * seconds for seconds in metric_values(self.data, SECONDS))])

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def print(self, text: str) -> None:
        self.printed_at = self.elapsed()
        print(f"[{duration(self.printed_at):>6}] {text}", flush=True)

    def start_phase(self, phase: str) -> None:
        self.phase = phase
        self.print(f"starting {phase}")

    def update(self, lines: list[str]) -> None:
        """Show what is new in the log's ``lines`` and in verl's metrics."""
        for marker, phase in START_UP.items():
            if any(marker in line for line in lines):
                self.start_phase(phase)
        for row in training_rows(self.new_rows()):
            self.data.append(row)
            self.shown += 1
            self.print(progress_line(self.data, self.steps))
        if not self.shown and self.elapsed() - self.printed_at > HEARTBEAT_S:
            self.print(f"still starting {self.phase}")

    def new_rows(self) -> list[dict]:
        """Return the rows that verl has logged since the last call, and append them to ``metrics.jsonl``."""
        file = self.out / "verl.jsonl"
        if not file.exists() or file.stat().st_size == self.bytes_read:
            return []
        with file.open("rb") as logged, (self.out / "metrics.jsonl").open("ab") as metrics:
            logged.seek(self.bytes_read)
            whole_lines, newline, _ = logged.read().rpartition(b"\n")
            metrics.write(whole_lines + newline)
            self.bytes_read += len(whole_lines + newline)
        return [json.loads(line) for line in whole_lines.splitlines()]


def progress_line(data: list[dict], steps: int) -> str:
    """Return one line on the last row of ``data``, of a run of ``steps`` steps."""
    row = data[-1]
    seconds = metric_values(data[-LAST:], SECONDS)
    rate = median(seconds) if seconds else None
    values = row["data"]
    flowrl = [f"  {name} {number(values[metric])}" for name, metric in FLOWRL.items() if metric in values]
    return (
        f"step {row['step']:>{len(str(steps))}}/{steps}"
        f"  reward {number(values[REWARD], '.3f')}"
        f"  mismatch: probs {number(values.get(PROBS_DIFF), '.1e')} k3 {number(values.get(K3_KL), '.1e')}"
        f"{''.join(flowrl)}"
        f"  loss scale {number(values.get(LOSS_SCALE), 'g')}"
        f"  skipped {number(metric_total(data, SKIPPED), 'd')}"
        f"  {number(rate, '.1f')} s/step"
        f"  left {'-' if rate is None else duration((steps - row['step']) * rate)}"
    )
