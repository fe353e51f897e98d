"""States of schedulers and scalers, before anything is set to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import FormatError
from paddleformers_fc.trainer.documents import refuse_unlike

CURRENT: dict[str, Any] = {"last_epoch": 3, "last_lr": 0.1, "use_dynamic_loss_scaling": True}


@pytest.mark.parametrize("steps", [-1, 0, 3, (1 << 53) - 1])
def test_a_state_with_a_number_of_steps_is_taken(steps: int) -> None:
    refuse_unlike({**CURRENT, "last_epoch": steps}, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("steps", [-2, -65_536, 1 << 53, int("9" * 300), float("nan"), float("inf")])
def test_a_state_with_steps_that_nobody_can_have_made_is_refused(steps: float) -> None:
    with pytest.raises(FormatError, match="last_epoch: invalid number of steps"):
        refuse_unlike({**CURRENT, "last_epoch": steps}, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("name", CURRENT)
def test_a_state_that_lacks_a_value_is_refused(name: str) -> None:
    saved = {key: value for key, value in CURRENT.items() if key != name}
    with pytest.raises(FormatError, match=f"{name}: NoneType in place of {type(CURRENT[name]).__name__}"):
        refuse_unlike(saved, CURRENT, Path("scheduler.json"))


@pytest.mark.parametrize("other", [{"last_epoch": "3"}, {"last_lr": [0.1]}, {"use_dynamic_loss_scaling": 1}])
def test_a_state_of_another_kind_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=f"{next(iter(other))}: "):
        refuse_unlike({**CURRENT, **other}, CURRENT, Path("scheduler.json"))
