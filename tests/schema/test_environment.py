"""Case B95: variables mean what they say, unknown ones are reported, wrong values are errors."""

import os
import subprocess
import sys

import pytest

from te_hal.schema.environment import TABLE, Environment, parse
from te_hal.schema.errors import ArgumentError

FLAGS = [variable.name for variable in TABLE if variable.kind == "flag"]
SPELLINGS = {
    **dict.fromkeys(("1", "true", "True", "TRUE", "yes", "on", " 1 ", "ON"), True),
    **dict.fromkeys(("0", "false", "False", "no", "off", "OFF", "", " ", " 0"), False),
}


def field_of(environment: Environment, variable: str) -> object:
    return getattr(environment, variable.removeprefix("TE_HAL_").lower())


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("text", "meant"), SPELLINGS.items(), ids=repr)
def test_a_flag_is_parsed_as_meant(name: str, text: str, meant: bool) -> None:
    assert field_of(parse({name: text}), name) is meant


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("text", ["2", "-1", "yep", "none", "truee", "0.0", "o n"])
def test_a_flag_that_means_nothing_is_an_error_with_name_and_spellings(name: str, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse({name: text})
    assert error.value.where == name
    assert repr(text) in error.value.got
    assert "1, on, true, yes" in error.value.accepted
    assert "0, false, no, off" in error.value.accepted
    assert error.value.todo


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_not_set_is_off(name: str) -> None:
    assert field_of(parse({}), name) is False


NAMES = {
    "TE_HAL_BACKEND": {"": None, "  ": None, "musa": "musa", " musa ": "musa"},
    "TE_HAL_POLICY": {"": None, " a b.toml ": "a b.toml"},
    **{
        f"TE_HAL_{name}": {
            "": {},
            " , ; ": {},
            "a": {"*": ("a",)},
            " a ,b,, c ": {"*": ("a", "b", "c")},
            "*=a": {"*": ("a",)},
            "gemm = a, b ; amax=;c;": {"gemm": ("a", "b"), "amax": (), "*": ("c",)},
        }
        for name in ("ORDER", "ALLOW", "DENY", "FALLBACK")
    },
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in NAMES for text in NAMES[name]], ids=repr)
def test_names_are_taken_without_the_space_around_them(name: str, text: str) -> None:
    assert field_of(parse({name: text}), name) == NAMES[name][text]


@pytest.mark.parametrize("text", ["=a", "gemm=a=b", "a;b", "gemm=a;gemm=b", " ;=;a"])
def test_backends_that_are_written_wrongly_are_an_error_with_the_form(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"TE_HAL_DENY: got .*op=name,name for one"):
        parse({"TE_HAL_DENY": text})


def test_every_variable_of_the_table_has_a_field_and_every_field_a_variable() -> None:
    fields = {f"TE_HAL_{field.upper()}" for field in Environment.__dataclass_fields__ if field != "unknown"}
    assert fields == {variable.name for variable in TABLE}
    assert all(variable.meaning for variable in TABLE)
    assert {variable.kind for variable in TABLE} <= {"flag", "name", "file", "backends", "folders"}


def test_only_unknown_names_of_ours_are_reported() -> None:
    variables = {"TE_HAL_BACKND": "musa", "TE_HAL_": "", "te_hal_backend": "x", "NVTE_DEBUG": "1", "TE_HALO": "1"}
    assert parse(variables).unknown == ("TE_HAL_", "TE_HAL_BACKND")
    assert parse({"TE_HAL_BACKEND": "musa"}).unknown == ()


def imported(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TE_HAL_")}
    return subprocess.run(
        [sys.executable, *options, "-c", "import te_hal, te_hal.ops, te_hal.schema.environment"],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_misspelt_names_give_one_warning_that_lists_them_and_the_right_ones() -> None:
    result = imported("-W", "always", TE_HAL_BACKND="musa", TE_HAL_FALBACK="null")
    assert result.returncode == 0, result.stderr
    warned = [line for line in result.stderr.splitlines() if "Warning:" in line]
    assert len(warned) == 1
    assert "unknown TE_HAL_BACKND, TE_HAL_FALBACK" in warned[0]
    assert all(variable.name in warned[0] for variable in TABLE)


def test_an_invalid_flag_is_a_clear_error_at_import() -> None:
    result = imported(**{FLAGS[0]: "maybe"})
    assert result.returncode == 1
    assert f"ArgumentError: {FLAGS[0]}: got 'maybe'; accepted: " in result.stderr
