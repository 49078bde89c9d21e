"""Backend musa against a stub of torch_musa and a stub of the kernel library, each program in a process of its own.

Nothing here ran on MUSA hardware: what is shown is that devices are looked for when they are asked for, that stream
and device of a call reach the library, and that every way in which it can be unusable is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import native_stub
import pytest

TESTS = Path(__file__).resolve().parent.parent

#: A CPU tensor that says it lies on a MUSA device, and a storage of such.
FAKES = """
import torch, te_hal
from te_hal import ops
from te_hal.schema.formats import E4M3, ScalingMode
from te_hal.schema.storage import QuantizedStorage

class Fake(torch.Tensor):
    device = torch.device("cpu")

def fake(tensor, index=0):
    made = tensor.as_subclass(type("On" + str(index), (Fake,), {"device": torch.device("musa", index)}))
    return made

def quantize(index=0):
    x, one, amax = (fake(t, index) for t in (torch.ones(4, 16), torch.ones(1), torch.zeros(1)))
    data = fake(torch.zeros(4, 16, dtype=torch.uint8), index)
    out = QuantizedStorage(format=E4M3, mode=ScalingMode.TENSOR, shape=(4, 16), dtype=torch.float32,
                           rowwise_data=data, rowwise_scale_inv=fake(torch.ones(1), index))
    return ops.quantize(x, one, amax=amax, out=out, dtype=torch.float8_e4m3fn)

def row():
    return next(row for row in te_hal.list_backends() if row.name == "musa")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stub library for musa that notes its calls."""
    native_stub.need()
    folder = tmp_path_factory.mktemp("library")
    native_stub.build(folder, "libte_hal_musa.so", BACKEND='"musa"', ARCHITECTURES='"mp_22,mp_31"')
    return folder


def run(
    program: str, *, stub: str | None = "", library: Path | None = None, check: bool = True, mate: bool = False
) -> str:
    """What a program prints. ``stub``: how the stub of torch_musa behaves; None: it is not installed. So with mate."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TE_HAL_")}
    environment |= {"TORCH_MUSA_STUB": stub or "", "XDG_CACHE_HOME": "/nonexistent"}
    paths = [str(TESTS), *([] if stub is None else [str(TESTS / "torch_musa_stub")])]
    paths += [str(TESTS / "mate_stub")] if mate else []
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    if library is not None:
        environment["TE_HAL_LIBRARY_PATH"] = str(library)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not check or result.returncode == 0, result.stderr
    return result.stdout.strip()


def reason(stub: str | None, library: Path | None) -> str:
    """Why the backend is unusable, as list_backends says it: one sentence."""
    said = run(FAKES + "print(row().usable, row().reason)", stub=stub, library=library)
    assert said.startswith("False "), said
    assert "\n" not in said
    return said


def test_a_machine_without_torch_musa_is_told_so(library: Path) -> None:
    assert "torch_musa is not installed" in reason(None, library)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("RuntimeError: torch 2.7.1 is needed", "cannot be imported: torch 2.7.1 is needed"),
        ("ImportError: libmusart.so.4: cannot open shared object file", "libmusart.so.4"),
        ("OSError: libsrv_um_MUSA.so: file too short", "file too short"),
    ],
)
def test_a_torch_musa_that_fails_on_import_is_quoted(failure: str, words: str, library: Path) -> None:
    assert words in reason(f"fails={failure}", library)


def test_a_torch_musa_that_brings_no_devices_along_is_told_from_one_without_any(library: Path) -> None:
    assert "left no torch.musa" in reason("leaves=nothing", library)
    assert "sees no GPU" in reason("devices=0", library)


def test_a_missing_kernel_library_names_the_command_that_builds_it() -> None:
    said = reason("", None)
    assert "libte_hal_musa.so" in said
    assert "te-hal build-kernels --target musa" in said


def test_a_library_without_code_for_the_device_is_refused_with_its_sentence(tmp_path: Path) -> None:
    sentence = '"check_device: device 0 is mp_21; this library holds mp_22, mp_31"'
    native_stub.build(
        tmp_path,
        "libte_hal_musa.so",
        BACKEND='"musa"',
        DEVICE_STATUS="TE_HAL_WRONG_ARCHITECTURE",
        SENTENCE=sentence,
    )
    assert sentence.strip('"') in reason("capability=2.1", tmp_path)


def test_a_library_of_another_target_is_refused(tmp_path: Path) -> None:
    native_stub.build(tmp_path, "libte_hal_musa.so")
    assert "a library for host" in reason("", tmp_path)


def test_torch_musa_is_imported_only_when_its_devices_are_asked_for(library: Path) -> None:
    program = """
    import sys, torch, te_hal, te_hal.modules
    from te_hal import ops
    te_hal.set_backend("cpu_reference")
    ops.amax(torch.ones(3))
    before = "torch_musa" in sys.modules
    te_hal.set_backend("musa")
    print(before, "torch_musa" in sys.modules)
    """
    assert run(program, library=library) == "False True"


def test_nothing_of_torch_is_changed(library: Path) -> None:
    program = """
    import torch, torch_musa
    places = {"torch": torch, "Tensor": torch.Tensor, "cuda": torch.cuda, "musa": torch.musa, "Module": torch.nn.Module}
    before = {name: dict(vars(place)) for name, place in places.items()}
    import te_hal, te_hal.modules
    te_hal.set_backend("musa")
    for name, place in places.items():
        now = vars(place)
        changed = {key for key in before[name] if now.get(key) is not before[name][key]} - {"current"}
        assert not changed, (name, changed)
    print("same")
    """
    assert run(program, library=library) == "same"


def test_the_current_stream_and_device_of_a_call_reach_the_library(library: Path) -> None:
    program = f"""
    {textwrap.indent(FAKES, " " * 4).strip()}
    import native_stub, pathlib
    te_hal.set_backend("musa")
    for index in (0, 0, 1, 1):
        quantize(index)
        calls = dict(native_stub.calls(pathlib.Path({str(library / "libte_hal_musa.so")!r})))
        prepared = int(calls.get("select_fp8_encoder", {{"stream": 0}})["stream"])
        print(int(calls["quantize"]["stream"]), prepared, torch.musa.entered, torch.musa.current)
        torch.musa.entered.clear()
    """
    said = run(program, stub="devices=2", library=library)
    # The first call on a device also has its FP8 instruction compared, on that device and stream.
    assert said.splitlines() == ["1000 1000 [0, 0] 0", "1000 0 [] 0", "1001 1001 [1, 1] 0", "1001 0 [1] 0"]


def test_tensors_elsewhere_are_refused_naming_both_devices(library: Path) -> None:
    program = """
    import torch, te_hal
    from te_hal import ops
    te_hal.set_backend("musa")
    try:
        ops.amax(torch.ones(3))
    except te_hal.schema.errors.BackendUnavailableError as error:
        print(error)
    """
    said = run(program, library=library)
    assert "tensors on cpu" in said
    assert "tensors on musa" in said


def test_a_forked_child_is_refused(library: Path) -> None:
    program = f"""
    {textwrap.indent(FAKES, " " * 4).strip()}
    import os, sys, warnings
    warnings.simplefilter("ignore")
    te_hal.set_backend("musa")
    quantize()
    kernel = te_hal.dispatch.forced_backend().kernels["update_delayed_scale"]
    child = os.fork()
    if child == 0:
        for call in (quantize, lambda: kernel(fake(torch.ones(2, 1)), fake(torch.ones(1)), fp8_max=448.0)):
            try:
                call()
            except te_hal.schema.errors.StateError as error:
                print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    quantize()
    print("the parent goes on")
    """
    *refused, last = run(program, library=library).splitlines()
    assert len(refused) == 2
    assert all("fork" in line for line in refused)
    assert last == "the parent goes on"


WAYS = {
    "3.1": {"e4m3 e5m2": "torch._scaled_mm", "bf16 bf16": "torch.mm", "e4m3 bf16": "the portable kernel"},
    "2.2": {"e4m3 e5m2": "decoded", "bf16 bf16": "torch.mm"},
    "2.1": {"e4m3 e4m3": "the portable kernel", "bf16 bf16": "the portable kernel", "fp16 fp16": "torch.mm"},
}


@pytest.mark.parametrize("capability", WAYS)
def test_the_capability_answer_says_which_way_a_product_goes(capability: str, library: Path) -> None:
    program = f"""
    {textwrap.indent(FAKES, " " * 4).strip()}
    from te_hal.schema.formats import E5M2, ColumnwiseOrder
    from te_hal.schema.storage import StorageKind
    from te_hal.schema.support import Call
    te_hal.set_backend("musa")
    def kind(fmt):
        order = ColumnwiseOrder.TRANSPOSED
        return StorageKind.of(fmt, ScalingMode.TENSOR, rowwise=True, columnwise=False, order=order)
    kinds = {{"e4m3": kind(E4M3), "e5m2": kind(E5M2), "bf16": torch.bfloat16, "fp16": torch.float16}}
    flags = {{"layout": "fprop", "accumulate": False, "out_dtype": torch.bfloat16}}
    for names in {list(WAYS[capability])}:
        a, b = (kinds[name] for name in names.split())
        call = Call("gemm", torch.device("musa", 0), {{"a": a, "b": b, "bias": None, "out": None}}, flags)
        answer = te_hal.dispatch.forced_backend().supports(call)
        print(bool(answer), answer.sentence)
    """
    said = run(program, stub=f"capability={capability}", library=library).splitlines()
    assert len(said) == len(WAYS[capability])
    for line, way in zip(said, WAYS[capability].values(), strict=True):
        assert line.startswith(f"True by {way}")


MATE, DEQUANTIZED = "mate's groupwise product", "dequantized with the factors of its blocks"
BLOCK_WAYS = {
    ("3.1", True): {
        "row square": MATE,
        "row row": DEQUANTIZED,
        "mx mx": DEQUANTIZED,
        "row bf16": "the portable kernel",
    },
    ("3.1", False): {"row square": DEQUANTIZED, "mx mx": DEQUANTIZED},
    ("2.2", True): {"row square": DEQUANTIZED, "square square": DEQUANTIZED},
    ("2.1", True): {"row square": "the portable kernel", "mx mx": "the portable kernel"},
}


@pytest.mark.parametrize(("capability", "mate"), BLOCK_WAYS)
def test_the_capability_answer_says_which_way_blocks_go(capability: str, mate: bool, library: Path) -> None:
    ways = BLOCK_WAYS[capability, mate]
    program = f"""
    {textwrap.indent(FAKES, " " * 4).strip()}
    from te_hal.schema.formats import ColumnwiseOrder
    from te_hal.schema.storage import StorageKind
    from te_hal.schema.support import Call
    te_hal.set_backend("musa")
    def kind(mode):
        return StorageKind.of(E4M3, mode, rowwise=True, columnwise=True, order=ColumnwiseOrder.TRANSPOSED)
    kinds = {{"row": kind("block_1x128"), "square": kind("block_128x128"), "mx": kind("mxfp8")}}
    kinds["bf16"] = torch.bfloat16
    flags = {{"layout": "fprop", "accumulate": False, "out_dtype": torch.bfloat16}}
    backend = te_hal.dispatch.forced_backend()
    def ask(a, b):
        given = {{"a": a, "b": b, "bias": None, "out": None}}
        return backend.supports(Call("gemm", torch.device("musa", 0), given, flags))
    for names in {list(ways)}:
        answer = ask(*(kinds[name] for name in names.split()))
        print(bool(answer), answer.sentence)
    refused = ask(kinds["row"], kinds["mx"])
    print(bool(refused), refused.sentence)
    """
    *said, mixed = run(program, stub=f"capability={capability}", library=library, mate=mate).splitlines()
    for line, way in zip(said, ways.values(), strict=True):
        assert line.startswith(f"True by {way}")
    assert mixed.startswith("False no product of operands with scaling modes 'block_1x128' and 'mxfp8'")
