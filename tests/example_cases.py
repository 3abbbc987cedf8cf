"""How each script of examples/ is trained on the testbed: tests/cluster/test_examples.py runs each case.

tests/contract/test_examples.py compares the scripts here with the files there.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS, SAVED_EVERY, RANKS = 40, 10, 4


@dataclass(frozen=True)
class Example:
    """One example with its arguments.

    Attributes:
        needs: `torch` runs in the test image, `frameworks` with the Python that `scripts/testbed frameworks` makes.
        arguments: of the script, beside those for steps and checkpoints.
        checkpoint_option: what the script calls the number of steps between checkpoints.
        launcher: what starts its ranks.
        losses: how many losses it records for each step: one on each rank for each batch that is added up; of a pipeline
            the last rank records one for each part of the batch.
        recorded_by: how many ranks record them.
    """

    script: str
    needs: str
    arguments: tuple[str, ...] = ()
    checkpoint_option: str = "--save-every"
    launcher: str = "torchrun"
    losses: int = RANKS
    recorded_by: int = RANKS

    @property
    def name(self) -> str:
        """For the names of its runs."""
        return "-".join((self.script.removesuffix(".py").replace("_", "-"), *self.arguments[1:2]))

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of all its runs; the pauses leave time to stop it, and cost no CPU."""
        return (
            "--steps", str(STEPS), self.checkpoint_option, str(SAVED_EVERY), "--log-every", "5",
            "--sleep-per-step", "0.4", *self.arguments,
        )  # fmt: skip


EXAMPLES = (
    Example("train.py", "torch", checkpoint_option="--checkpoint-every"),
    Example(
        "techniques.py", "torch", ("--precision", "bfloat16", "--accumulate", "2", "--recompute"), losses=2 * RANKS
    ),
    Example("fsdp2.py", "torch"),
    Example("tensor_parallel.py", "torch"),
    Example("pipeline.py", "torch", ("--parts", "8"), losses=8, recorded_by=1),
    Example("shards.py", "frameworks"),
    Example("finetune.py", "frameworks"),
    Example("jax_train.py", "frameworks", launcher="srun"),
    Example("accelerate_train.py", "frameworks", ("--precision", "bf16", "--accumulate", "2"), losses=2 * RANKS),
    Example("lightning_train.py", "frameworks", ("--precision", "bf16-mixed", "--accumulate", "2"), losses=2 * RANKS),
    Example("deepspeed_zero.py", "frameworks", ("--stage", "1")),
    Example("deepspeed_zero.py", "frameworks", ("--stage", "2")),
    Example("deepspeed_zero.py", "frameworks", ("--stage", "3")),
)
