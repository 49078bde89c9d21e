"""The compiled binding (build_native.py). Beyond cffi nobody knows its types."""

from typing import Any

lib: Any
ffi: Any
