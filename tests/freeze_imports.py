"""Imported last by the server that processes are forked from: what it has imported is left out of garbage collection.

Each run calls gc.collect several times, which takes 0.2 s with the objects of torch.
"""

import gc

gc.collect()
gc.freeze()
