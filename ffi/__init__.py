"""The native side: C ABI header, device kernels, and the cffi binding that reaches them.

Nothing is here yet. Only backends import this package, and nothing above it sees a cffi object.
"""
