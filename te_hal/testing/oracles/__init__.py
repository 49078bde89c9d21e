"""What each op is due to give, written again for the kit: numpy for exact contracts, float64 for bounded ones.

Nothing here calls an op or a backend. Layouts of scales are the schema's (``te_hal.schema.block_scales``).
"""
