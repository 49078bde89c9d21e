"""`te-hal new-backend`: a whole out-of-tree backend to start from, written from the schemas and the C header.

Stands above everything and is imported by the command line alone.

- project: the name, where it goes, and the files.
- python_stubs: the ops of a family as functions to fill in. c_stubs: the entries of te_hal.h as functions to fill in.
- template: the other files, in which @WORD@ is replaced.
"""

from __future__ import annotations

from te_hal.porting.project import Project, write_project

__all__ = ["Project", "write_project"]
