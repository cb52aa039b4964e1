"""Plans a run before anything is loaded: memory, tokens and time, by formula."""

from pl_grouprl.planning.memory import Hardware
from pl_grouprl.planning.plan import RunPlan, plan_run
from pl_grouprl.planning.scaling import Rates
from pl_grouprl.utilities.device_defaults import DEVICES

__all__ = ["DEVICES", "Hardware", "Rates", "RunPlan", "plan_run"]
