"""Registration: only what is proved is a family, and other distributions declare theirs by an entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import Family, family_for, register, registry
from paddleformers_fc.families.declarations import Statement
from paddleformers_fc.families.language import column, same, when
from tests.families.spaces import BY_NAME

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
STATEMENTS = (
    *same("model.embed_tokens.weight", shape=("vocab", "hidden"), cut=0),
    *column("model.layers.{layer}.up", outputs="ffn"),
)
OURS = Family("ours", STATEMENTS, tiny=TINY)


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on ``sys.path``, as ``site-packages`` is; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install(
    site: Path, source: str, name: str = "their", module: str = "their_families", model_type: str = "theirs"
) -> None:
    """What an installer leaves behind for a distribution of one module and one entry point."""
    (site / f"{module}.py").write_text(source, encoding="utf-8")
    info = site / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", encoding="utf-8")
    entry = f"[paddleformers_fc.families]\n{model_type} = {module}:FAMILY\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


GOOD = """
from paddleformers_fc.families import Family
from paddleformers_fc.families.language import column, same

loaded = []
loaded.append(1)
FAMILY = Family(
    "{name}",
    (
        *same("model.embed_tokens.weight", shape=("vocab", "hidden"), cut=0),
        *column("model.layers.{{layer}}.up", outputs="ffn"),
    ),
    tiny={{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}},
)
"""


def test_what_is_no_family_or_belongs_to_another_cannot_be_registered() -> None:
    wrong: list[tuple[tuple[Any, ...], str]] = [
        (("llama",), "family='llama'"),
        ((OURS, ["hidden_size"], {}), r"config=\['hidden_size'\]"),
        ((OURS, {}, 3), "header=3"),
        ((OURS, {}, {"model.norm.weight": 8}), "header={'model.norm.weight': 8}"),
    ]
    for given, fault in wrong:
        with pytest.raises(OptionError, match=f"Invalid argument: {fault}"):
            register(*given)
    with pytest.raises(OptionError, match="of model_type 'qwen2', and the family of 'ours'"):
        register(OURS, {"model_type": "qwen2"}, {})


def test_a_family_without_tensors_cannot_be_registered() -> None:
    with pytest.raises(MappingError, match="declares no tensor under its tiny configuration"):
        register(structs.replace(OURS, statements=when(False, STATEMENTS)))


FAULTY: dict[str, tuple[tuple[Statement, ...], str]] = {
    "two targets of one canonical tensor": (
        column("model.layers.{layer}.again", file="model.layers.{layer}.up", outputs="ffn"),
        "is read more than once",
    ),
    "an axis that four ranks cannot share": (
        same("model.pair.weight", shape=(2,), cut=0),
        "model.pair.weight: length 2 on axis 0 is not divisible by 4",
    ),
    "a placeholder without numbers": (same("model.blocks.{block}.weight"), "Unknown placeholder {block}"),
    "a canonical number that the name does not have": (
        same("model.norm.weight", file="model.norms.{layer}.weight"),
        "model.norm.weight: its canonical names contain layer",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_family_that_is_not_proved_cannot_be_registered(fault: str) -> None:
    statements, named = FAULTY[fault]
    with pytest.raises(MappingError) as caught:
        register(structs.replace(OURS, statements=(*STATEMENTS, *statements)))
    assert named in str(caught.value)
    with pytest.raises(MappingError, match="No family declares model_type 'ours'"):
        family_for({"model_type": "ours"})


def test_a_registered_family_is_found_by_its_model_type_which_belongs_to_it_alone() -> None:
    register(OURS)
    assert family_for({"model_type": "ours"}) is OURS
    with pytest.raises(MappingError, match="ours: another family is registered for this model_type"):
        register(structs.replace(OURS, optional=("another.",)))
    assert family_for({"model_type": "ours"}) is OURS
    registry._registered.pop("llama", None)
    with pytest.raises(MappingError, match="llama: another family is registered for this model_type"):
        register(structs.replace(OURS, name="llama"))


def test_a_family_of_another_distribution_is_loaded_when_its_model_type_is_requested_and_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, GOOD.format(name="theirs"))
    assert registry.is_known({"model_type": "theirs"})
    assert not registry.is_known({})
    assert family_for({"model_type": "llama"}) is BY_NAME["llama"]
    # The files of distributions are read once.
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail("read again"))
    with pytest.raises(MappingError, match=r"\w, theirs"):
        family_for({"model_type": "unheard_of"})
    assert "their_families" not in sys.modules
    family = family_for({"model_type": "theirs"})
    assert family.name == "theirs"
    assert family_for({"model_type": "theirs"}) is family
    assert sys.modules["their_families"].loaded == [1]


BROKEN = {
    "an import that fails": ("import no_such_module", "ModuleNotFoundError"),
    "an object that is not there": ("", "AttributeError"),
    "an object of another kind": ("FAMILY = 3", "their_families:FAMILY is int, not a Family"),
    "a family of another name": (GOOD.format(name="others"), "it declares model_type others"),
    "a family that is not proved": (
        GOOD.format(name="theirs").replace('outputs="ffn"', 'outputs="fnn"'),
        "`fnn` is not in the configuration",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_failing_family_is_named_with_its_distribution_and_not_registered(site: Path, fault: str) -> None:
    source, named = BROKEN[fault]
    install(site, source)
    for _ in range(2):
        with pytest.raises(MappingError) as caught:
            family_for({"model_type": "theirs"})
        assert caught.value.where == "distribution their 1.2, entry point theirs = their_families:FAMILY"
        assert named in " ".join(caught.value.evidence)
    assert "theirs" not in registry._registered
    assert family_for({"model_type": "llama"}) is BY_NAME["llama"]
    # Another length: a module's cached code is matched with its source by time and size.
    (site / "their_families.py").write_text(f"{GOOD.format(name='theirs')}# {fault}", encoding="utf-8")
    sys.modules.pop("their_families", None)
    assert family_for({"model_type": "theirs"}).name == "theirs"


@pytest.mark.parametrize("model_type", ["theirs", "llama"])
def test_two_declarations_of_one_model_type_are_refused_with_both_origins(site: Path, model_type: str) -> None:
    for name in ("one", "two")[: 1 if model_type == "llama" else 2]:
        install(site, GOOD.format(name=name), name, f"{name}_families", model_type)
    with pytest.raises(MappingError) as caught:
        family_for({"model_type": model_type})
    origins = {line.split(",")[0] for line in caught.value.evidence}
    assert origins == {"distribution one 1.2", "this package" if model_type == "llama" else "distribution two 1.2"}


def test_a_configuration_without_a_model_type_is_refused_as_such() -> None:
    with pytest.raises(MappingError, match="has no model_type") as raised:
        family_for({"hidden_size": 8})
    assert raised.value.next_step
