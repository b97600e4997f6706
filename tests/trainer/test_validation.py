"""Held-out samples are measured as many as the config says, the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_target import make_home, run_config

from trainer.config import parse_config
from trainer.data.pack import PackedBatches
from trainer.drafter.model import Drafter
from trainer.objective import slots_counted
from trainer.resolve import resolve
from trainer.run import open_run, prepare_run
from trainer.validation import Validator

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("microbatches", [1, 4])
def test_as_many_microbatches_are_measured_as_asked_for(tmp_path: Path, microbatches: int) -> None:
    tree = run_config(
        make_home(tmp_path),
        data={"held_out": 0.6},
        optimization={"rows": 1, "microbatches": microbatches},
        checkpoint={"validate_batches": 3},
    )
    run = prepare_run(open_run(resolve(parse_config(tree, source="t", base=tmp_path))))
    validator, drafter = Validator(run), Drafter(run.resolved.drafter)
    measured = validator.measure(drafter.state_dict())
    run.writer.close()
    run.compile_lock.close()
    assert measured is not None
    held_out = PackedBatches(run.data.held_out, run.config, 0)
    assert len(held_out.packed) > 3, "there is more to measure"
    places = [divmod(index, microbatches) for index in range(3)]
    counted = [slots_counted(held_out(*place), run.resolved.drafter.block_size) for place in places]
    assert measured.blocks == sum(int(block[..., 0].sum()) for block in counted)
    assert validator.measure(drafter.state_dict()) == measured
