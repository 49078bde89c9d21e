"""Known failures of MUSA machines: the words that they show themselves in, the usual cause, and the cure.

From the vendor's FAQs, install guides and issue trackers; none was seen on hardware of ours.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Symptom(NamedTuple):
    """A failure that is known.

    Attributes:
        pattern: finds it in a message.
        cure: usual cause, and what to do.
    """

    pattern: str
    cure: str


SYMPTOMS = (
    Symptom(
        r"\b801\b|operation not supported",
        "usually the IOMMU: vendor guides want it on for S4000 hosts with 256 GB or more, off for S5000",
    ),
    Symptom(
        r"libsrv_um_MUSA|file too short",
        "mt-container-toolkit is missing or not bound to Docker; start the container with MTHREADS_VISIBLE_DEVICES=all",
    ),
    Symptom(
        r"(libmudnn|libmublas|libmusart|libmccl)\S*: cannot open",
        "add the SDK's lib folder (/usr/local/musa/lib) to LD_LIBRARY_PATH; it is there: the SDK has another version",
    ),
    Symptom(
        r"(libmupti|libmusparse)\S*: cannot open",
        "a wheel for a newer SDK (5.2) on an older one (5.1): install the SDK that the wheel names",
    ),
    Symptom(
        r"libmusa_python\S*: undefined symbol|undefined symbol.*(torch|c10|at::)",
        "torch_musa, torch and the SDK do not belong together: install the torch that this torch_musa was built for",
    ),
    Symptom(r"undefined symbol", "the library that defines it is missing or of another version; see ldd and c++filt"),
    Symptom(r"unsupported display driver", "the runtime is newer than the driver: update it, or take the older SDK"),
    Symptom(r"unsupported CUDA gpu architecture: mp_", "mcc took the source for CUDA: it needs -x musa"),
    Symptom(
        r"\berror (98|209)\b|this library holds",
        "the library has no code for this GPU: te-hal build-kernels --target musa --arch mp_22 (S4000), mp_31 (S5000)",
    ),
    Symptom(r"cannot find -lmusart|mcc.*not found", "set MUSA_HOME to the SDK, or add its bin folder to PATH"),
    Symptom(
        r"sees no GPU|no such device|invalid device ordinal|No MUSA runtime",
        "load the driver module (lsmod | grep mtgpu), look at MUSA_VISIBLE_DEVICES, and join the group render where "
        "only root sees the devices",
    ),
)


def cure_for(message: str) -> str:
    """What to do about a message; empty where it is not known. The first symptom that it shows counts."""
    return next((symptom.cure for symptom in SYMPTOMS if re.search(symptom.pattern, message)), "")
