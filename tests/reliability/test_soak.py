"""The soak command, for seconds instead of minutes: it finds all well, and says so when it is not."""

import pytest

from tests import soak
from tests.support.files.scale import SEED


def test_a_short_soak_finds_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "0.05", "--seed", str(SEED)]) == 0
    assert capsys.readouterr().out.endswith("all is well\n")


def test_another_answer_to_the_same_question_is_wrong() -> None:
    import numpy as np

    tally = soak.Tally()
    tally.check("q", np.zeros(3))
    tally.check("q", np.zeros(3))
    assert tally.wrong == []
    tally.check("q", np.ones(3))
    assert tally.wrong == ["another answer to q"]
