"""A user's program under `mypy --strict`: misspelt names are errors, correct ones are not."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from tests.support import ROOT
from trocar._request.edit_operations import OPERATIONS, EditOperation
from trocar._request.statistic_options import StatisticName
from trocar._request.taps import STATISTICS

CORRECT = """\
import numpy as np

import trocar

images = np.zeros((1, 3, 8, 8), np.float32)
with trocar.connect("gpu1") as client:
    edit = trocar.edit("layer3", "scale", 0.0, channels=[1, 2], order="after")
    tap = trocar.tap("layer4", stats=["mean", "std"], over="channel", cast="float16")
    maps = client.extract("resnet50", images, taps=["layer4", tap], edits=[edit, "stored"])
    loss = trocar.training.loss_term("cross_entropy", label_smoothing=0.1)
    trainer = client.train("resnet50", head=10, trainable="fc", losses=[loss, "l2_norm"], precision="bf16")
    print(maps["layer4"].shape, trainer.step(images, [1]).loss)
"""

MISSPELT = {
    'trocar.edit("layer3", "scael", 0.0)': "scael",
    'trocar.edit("layer3", "scale", 0.0, order="afterwards")': "afterwards",
    'trocar.edit("layer3", "scale", 0.0, channels="all")': "channels",
    "trocar.edit(3, 'zero')": "edit",
    'trocar.tap("layer4", stat=["mean"])': "stat",
    'trocar.tap("layer4", stats=["meen"])': "meen",
    'trocar.tap("layer4", stats="meen")': "meen",
    'trocar.tap("layer4", over="chanel")': "chanel",
    'trocar.tap("layer4", cast="float61")': "float61",
    'client.extract("resnet50", images, tabs=["layer4"])': "tabs",
    'client.extract("resnet50", images, [4])': "int",
    'client.train("resnet50", trainabel="fc")': "trainabel",
    'client.train("resnet50", precision="fp16")': "fp16",
    'client.train("resnet50", on_nonfinite="ignore")': "ignore",
    'client.train("resnet50", losses="cross_entrpy")': "cross_entrpy",
    'client.train("resnet50", losses=["mse", "cross_entrpy"])': "cross_entrpy",
    'client.train("resnet50", optimizer="sgd")': "optimizer",
    'trocar.training.loss_term("mes")': "mes",
    'trocar.training.schedule("cosin")': "cosin",
    'trocar.training.schedule("cosine", per="batch")': "batch",
    'trocar.training.regularizer("fc", 0.1, norm="l3")': "l3",
    "trainer.fit(images, epoch=3)": "epoch",
}


CONFIG = """\
[mypy]
strict = true
[mypy-matplotlib.*,pyarrow.*,ray.*,zarr.*]
follow_imports = skip
"""
"""Ray alone brings 2,300 modules, torch's among them, in which no name of ours is declared."""


def findings(program: str, folder: Path) -> dict[int, str]:
    """Return what mypy says of a program, by line."""
    file, config = folder / "program.py", folder / "mypy.ini"
    file.write_text(program, encoding="utf-8")
    config.write_text(CONFIG, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--cache-dir",
        str(folder),
        str(file),
    ]
    search = {"MYPYPATH": ":".join(str(ROOT / part) for part in ("proto", "client", "service"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=search)
    assert done.returncode in (0, 1), done.stderr
    found: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith(f"{file.name}:"):
            number = int(line.split(":")[1])
            found[number] = found.get(number, "") + line
    return found


def test_misspelt_names_are_errors_of_mypy_and_correct_ones_are_not(tmp_path: Path) -> None:
    first = CORRECT.count("\n") + 1
    found = findings(CORRECT + "\n".join(MISSPELT), tmp_path)
    wrong = dict(enumerate(MISSPELT, first))
    assert {number: text for number, text in found.items() if number < first} == {}
    assert [line for number, line in wrong.items() if number not in found] == []
    assert [line for number, line in wrong.items() if MISSPELT[line] not in found[number]] == []


def test_names_for_type_checkers_are_those_that_exist() -> None:
    assert set(get_args(EditOperation)) == set(OPERATIONS)
    assert set(get_args(StatisticName)) == set(STATISTICS)
