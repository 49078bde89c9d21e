"""Cut the recorded files down to what this project's tests read.

    python tests/golden/select_keys.py FOLDER

FOLDER holds the files as they were recorded; README.md here says how. Keys are kept by the patterns below; a tensor
that equals another of its file is stored once, the metadata's ``alias`` leading from the one key to the other.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).parent

#: File to the pattern that a kept key matches from its start.
KEPT = {
    "quantizers": r"delayed/|special/|current/|block/|nvfp4ref/",
    "functional": r"act/|softmax/|gemm/current/|dpa/|rope/|adam/|moe/|xent/",
    "fused": r".*/(current|delayed)/",
    "fused_blocks": r".*/block[12]d/",
    "state": r"max4/|recent4/|moves/(?!7_calibrating)",
    "training": r"microbatch/|fp8_params/",
    "checkpoint_next_step": r".*",
    "modules_bf16": r"(?!TransformerLayer.*core_attention)\w+/bfloat16/(none|current|block|delayed_\w+)/",
    "modules_fp32": r"(LayerNorm)?Linear/float32/",
}

#: Files kept as they are.
WHOLE = ("te_checkpoint_delayed_hybrid_max.pt", "curves.json")


def main(folder: Path) -> None:
    """Write one file per entry of KEPT and of WHOLE."""
    for name, pattern in KEPT.items():
        select(folder / f"{name}.safetensors", HERE / f"{name}.safetensors", re.compile(pattern))
    for name in WHOLE:
        shutil.copyfile(folder / name, HERE / name)


def select(source: Path, target: Path, pattern: re.Pattern[str]) -> None:
    """Copy the keys that match."""
    first: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    alias: dict[str, str] = {}
    with safe_open(source, "pt") as recorded:
        metadata = recorded.metadata()
        same = json.loads(metadata["alias"])
        for key in sorted(filter(pattern.match, {*recorded.keys(), *same})):
            tensor = recorded.get_tensor(same.get(key, key))
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            holder = first.setdefault((tensor.dtype, tensor.shape, raw), key)
            if holder == key:
                tensors[key] = tensor
            else:
                alias[key] = holder
    save_file(tensors, target, {"source": metadata["source"], "alias": json.dumps(alias)})
    target.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
