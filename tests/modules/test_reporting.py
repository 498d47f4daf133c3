"""The table at start: rows that do not depend on a model."""

from lightning_megatron_rl.modules.reporting import StepReport
from lightning_megatron_rl.modules.sft import SFTModule
from lightning_megatron_rl.utilities import cpus


class Load:
    """Others that keep so many CPUs busy."""

    def __init__(self, busy: float) -> None:
        self.busy = busy

    def cpus(self) -> float:
        return self.busy


def test_cpus_are_in_the_table_and_a_busy_machine_with_its_price():
    count = cpus.usable_cpus().count
    module = StepReport(SFTModule("nothing"))
    assert isinstance(module._others, cpus.OthersLoad)
    module._others = Load(0.0)
    (row,) = module._describe_cpus()
    assert row[0] == "CPUs"
    assert row[1].startswith(f"{count} by ")
    module._others = Load(float(count))
    rows = dict(module._describe_cpus())
    assert f"keep {count:.1f} of {count} CPUs busy: a step may take 2.0 times as long" in rows["load"]
