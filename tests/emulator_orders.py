"""The orders of threads that tests run the emulated device in."""

#: (threads of the host, wave, seed): in sequence, and two random orders, one of them with waves of 128.
ORDERS = {"in_sequence": (2, 32, -1), "random_wave_32": (2, 32, 1), "random_wave_128": (1, 128, 2)}
