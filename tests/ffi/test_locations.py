"""The first library that is there is used, or the search ends with what is wrong with it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import native_stub
import pytest

from te_hal.ffi import locations
from te_hal.ffi.sources import source_hash
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "libte_hal_musa.so"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Folders that stand for the three places, all empty."""
    native_stub.need()
    found = {name: tmp_path / name for name in ("named", "cache", "shipped")}
    for folder in found.values():
        folder.mkdir()
    environment = dataclasses.replace(ENVIRONMENT, library_path=(str(found["named"]),))
    monkeypatch.setattr(locations, "ENVIRONMENT", environment)
    monkeypatch.setattr(locations, "cache_folder", lambda: found["cache"])
    monkeypatch.setattr(locations, "SHIPPED", found["shipped"])
    return found


def build(folder: Path, **macros: object) -> Path:
    folder.mkdir(exist_ok=True)
    return native_stub.build(folder, NAME, **{"BACKEND": '"musa"', **macros})


def test_a_named_folder_comes_before_a_build_and_that_before_what_was_installed(places: dict[str, Path]) -> None:
    own = {"MINE": 1}
    shipped = build(places["shipped"], HASH=f'"{source_hash()}"', **own)
    assert locations.find_library("musa").path == shipped
    built = build(places["cache"] / f"musa-mp_31-{source_hash()}")
    assert locations.find_library("musa").path == built
    named = build(places["named"])
    assert locations.find_library("musa").path == named


def test_of_several_builds_the_newest_is_used(places: dict[str, Path]) -> None:
    old = build(places["cache"] / f"musa-mp_31-{source_hash()}")
    new = build(places["cache"] / f"musa-mp_22-mp_31-{source_hash()}")
    os.utime(old, (1, 1))
    assert locations.find_library("musa").path == new


@pytest.mark.parametrize("folder", ["musa-mp_31-0123456789abcdef", "musa-mp_31-address-{}", "musagain-{}"])
def test_builds_of_other_sources_other_targets_and_for_sanitizers_are_passed_over(
    folder: str, places: dict[str, Path]
) -> None:
    build(places["cache"] / folder.format(source_hash()))
    with pytest.raises(BackendUnavailableError, match="no such file in"):
        locations.find_library("musa")


def test_nothing_found_names_every_place_and_the_command(places: dict[str, Path]) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        locations.find_library("musa")
    text = str(caught.value)
    assert all(str(folder) in text for folder in places.values())
    assert NAME in text
    assert "te-hal build-kernels --target musa" in text


def test_a_library_that_is_refused_ends_the_search(places: dict[str, Path]) -> None:
    build(places["cache"] / f"musa-mp_31-{source_hash()}")
    (places["named"] / NAME).write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match="no ELF library"):
        locations.find_library("musa")


def test_a_library_for_another_target_under_this_name_is_refused(places: dict[str, Path]) -> None:
    build(places["named"], BACKEND='"cuda"')
    with pytest.raises(BackendUnavailableError, match="a library for cuda; accepted: one for musa"):
        locations.find_library("musa")


def test_an_installed_library_of_other_sources_is_refused(places: dict[str, Path]) -> None:
    build(places["shipped"], HASH='"0123456789abcdef"')
    with pytest.raises(BackendUnavailableError, match=r"built from other sources \(0123456789abcdef\)"):
        locations.find_library("musa")
