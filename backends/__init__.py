"""Implementations of the op interface, one folder each.

Nothing here is imported by name: a backend joins through the entry-point group `te_hal.backends`,
the in-tree ones included. A backend imports its own folder, `te_hal.ffi` and `te_hal.schema`, never
another backend, so any folder can be deleted without harm to the rest.
"""
