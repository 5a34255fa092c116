"""What running and finished sequences keep: pages of planes, states, and the prefix tree over them.

`pages` and `prefix` are torch-free bookkeeping; `pool` owns the buffers.
"""
