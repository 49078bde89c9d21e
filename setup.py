"""Build steps that `pyproject.toml` cannot express; the metadata is all there.

`python setup.py -q egg_info` gives a plain checkout on PYTHONPATH the entry points that backend
discovery reads.
"""

from setuptools import setup

setup()
