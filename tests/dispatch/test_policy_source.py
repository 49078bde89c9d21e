"""A policy in a file says what the same policy in Python says; what means nothing is refused by name."""

import pytest

import te_hal
from te_hal import Policy
from te_hal.dispatch import policy_source
from te_hal.schema.environment import parse
from te_hal.schema.errors import ArgumentError, UnsupportedError

FILE = """
["*"]
order = ["musa", "cuda"]
deny = ["null"]
fallback = ["cpu_reference"]

[gemm]
backend = "cpu_reference"
fallback = []

[rmsnorm_fwd]
allow = ["cpu_reference"]
"""


def test_a_file_says_what_python_says(tmp_path) -> None:
    (tmp_path / "policy.toml").write_text(FILE)
    assert te_hal.read_policy(tmp_path / "policy.toml") == Policy(
        per_op={"gemm": "cpu_reference"},
        fallback=("cpu_reference",),
        order=("musa", "cuda"),
        allow={"rmsnorm_fwd": ("cpu_reference",)},
        deny=("null",),
        fallback_per_op={"gemm": ()},
    )


WRONG = {
    "no TOML": ("[gemm", "no TOML"),
    "no text": (b"\xff\xfe", "no TOML"),
    "an unknown op": ("[gemmm]", "got op 'gemmm'; accepted: .*gemm"),
    "an unknown key": ('[gemm]\nallows = ["null"]', r"\[gemm\]: got 'allows'; accepted: backend, order, allow"),
    "a value outside of a table": ('deny = ["null"]', "outside of a table"),
    "one name where a list is due": ('[gemm]\ndeny = "null"', "deny: got 'null'; accepted: a list"),
    "a list where one name is due": ('[gemm]\nbackend = ["null"]', "backend: got .*accepted: a backend's name"),
    "a list of numbers": ("[gemm]\norder = [1]", "a list of backends' names"),
    "a backend for every op": ('["*"]\nbackend = "null"', "use order, or TE_HAL_BACKEND"),
    "a name twice": ('[gemm]\ndeny = ["null", "null"]', "deny of gemm: got .*each backend once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_means_nothing_in_a_file_is_refused_naming_the_file(case, tmp_path) -> None:
    text, named = WRONG[case]
    path = tmp_path / "policy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=named) as error:
        te_hal.read_policy(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ArgumentError, match="a file that cannot be read"):
            te_hal.read_policy(path)


def test_an_old_python_without_a_reader_of_toml_says_what_to_install(monkeypatch, tmp_path) -> None:
    def no_module(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(policy_source, "import_module", no_module)
    with pytest.raises(UnsupportedError, match="pip install tomli, or use TE_HAL_ORDER"):
        te_hal.read_policy(tmp_path / "policy.toml")


def start(monkeypatch, **variables):
    monkeypatch.setattr(policy_source, "ENVIRONMENT", parse(variables))
    return policy_source.start_policy.__wrapped__()


def test_variables_count_instead_of_the_file_for_the_ops_they_name(monkeypatch, tmp_path) -> None:
    (tmp_path / "policy.toml").write_text(FILE)
    policy, said_by = start(
        monkeypatch,
        TE_HAL_POLICY=str(tmp_path / "policy.toml"),
        TE_HAL_DENY="cuda;gemm=musa",
        TE_HAL_FALLBACK="gemm=null",
    )
    assert policy.deny == {"*": ("cuda",), "gemm": ("musa",)}
    assert (policy.fallback, policy.fallback_per_op) == (("cpu_reference",), {"gemm": ("null",)})
    assert policy.order == {"*": ("musa", "cuda")}
    assert said_by == "TE_HAL_POLICY, TE_HAL_DENY, TE_HAL_FALLBACK"


def test_without_variables_the_policy_is_the_default(monkeypatch) -> None:
    assert start(monkeypatch)[0] == Policy()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"TE_HAL_DENY": "gemmm=musa"}, "TE_HAL_DENY: got op 'gemmm'"),
        ({"TE_HAL_DENY": "a", "TE_HAL_ALLOW": "b,b"}, "TE_HAL_ALLOW, TE_HAL_DENY: Policy: allow of *"),
        ({"TE_HAL_POLICY": "/no/such/file"}, "TE_HAL_POLICY (/no/such/file): got a file that cannot be read"),
    ],
)
def test_variables_that_mean_nothing_are_refused_by_name(monkeypatch, variables, named) -> None:
    with pytest.raises(ArgumentError) as error:
        start(monkeypatch, **variables)
    assert str(error.value).startswith(named)
