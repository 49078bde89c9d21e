# The compiled binding (build_native.py). Its types are cffi's, made at build time.
from typing import Any

lib: Any
ffi: Any
