"""Kernels in Python: each checks nothing that the schema has checked, makes its outputs, and makes one native call.

Every function has the signature of its op's schema behind a first argument, the Native that it runs on.
"""
