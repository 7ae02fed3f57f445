"""Who may share a pass: a proof, the operator's setting, the call's wish, the numerics, the principal."""

import asyncio
from pathlib import Path

import pytest

import trocar_server
from trocar_server.caller import ANONYMOUS, set_principal
from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import AS_USUAL, Execution
from trocar_server.engine.schedule.merge_group import MergeGroup, merge_group
from trocar_server.models.spec import Merge


async def group_of(
    setting: Merge,
    principal: str | None,
    execution: Execution = AS_USUAL,
    numerics: str = "fast",
    mixed_rows: str = "",
) -> MergeGroup | None:
    async def call() -> MergeGroup | None:
        if principal is not None:
            set_principal(principal)
        return merge_group(setting, execution, Numerics(numerics), mixed_rows)

    return await asyncio.create_task(call())


@pytest.mark.parametrize("principal", [None, ANONYMOUS, "anna"])
async def test_nobody_is_merged_where_it_is_off(principal: str | None) -> None:
    assert await group_of(Merge.OFF, principal) is None


@pytest.mark.parametrize("setting", Merge)
async def test_exact_calls_and_calls_that_refuse_run_alone(setting: Merge) -> None:
    assert await group_of(setting, "anna", numerics="exact") is None
    assert await group_of(setting, "anna", Execution(merge=False)) is None


@pytest.mark.parametrize("setting", Merge)
async def test_without_a_proof_calls_run_alone(setting: Merge) -> None:
    assert await group_of(setting, "anna", mixed_rows="it goes along the rows") is None
    assert await group_of(setting, "anna", mixed_rows=Built.mixed_rows) is None


async def test_a_principal_is_merged_with_nobody_else() -> None:
    anna, again, bert = [await group_of(Merge.CALLER, name) for name in ("anna", "anna", "bert")]
    assert anna is not None
    assert (anna == again, anna == bert) == (True, False)
    everybody = [await group_of(Merge.EVERYBODY, name) for name in ("anna", "bert", ANONYMOUS, None)]
    assert None not in everybody
    assert len(set(everybody)) == 1
    assert everybody[0] != anna


@pytest.mark.parametrize("principal", [None, ANONYMOUS])
async def test_callers_without_a_token_may_be_anybody(principal: str | None) -> None:
    assert await group_of(Merge.CALLER, principal) is None


def test_nothing_else_decides_who_is_merged() -> None:
    """One function makes groups, one caller asks it, and one queue forms passes of several calls."""
    server = Path(trocar_server.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in server.rglob("*.py")}

    def users(name: str) -> set[str]:
        return {path.name for path, text in sources.items() if f" {name}(" in text or f"={name}(" in text}

    assert users("MergeGroup") == {"merge_group.py"}
    assert users("merge_group") == {"merge_group.py", "variants.py"}
    assert users("MergingQueue") == {"merging.py", "variants.py"}
    assert users("run_together") == {"runner.py"}  # `variants.py` hands it on
