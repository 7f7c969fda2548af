"""What candidates share whose plan is a module of its own: it says what they refuse, which configs they try, and what
these cost."""

from __future__ import annotations

from typing import Any

from nbdnn.candidate import YES, ConfigT, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.launch import LaunchedCandidate


class Planned(LaunchedCandidate[ConfigT]):
    """plan: a module with `refusal` (problem, device) -> '' or why not, `configs` (problem, device) and `estimate_us`
    (problem, config, device)."""

    plan: Any

    def supports(self, problem: Any, device: Gpu) -> Support:
        refused = self.plan.refusal(problem, device)
        return Support(False, refused) if refused else YES

    def configs(self, problem: Any, device: Gpu) -> tuple[ConfigT, ...]:
        return self.plan.configs(problem, device)

    def estimate(self, problem: Any, config: ConfigT, device: Gpu) -> float:
        return self.plan.estimate_us(problem, config, device)
