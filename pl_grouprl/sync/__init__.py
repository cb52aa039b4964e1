"""Syncs the policy's weights from the trainer to a sampler with its own copy.

    strategy.named_weights      whole weights, one at a time, gathered by all ranks
      -> stream                 checkpoint names and values; adapters merged (`merge`) or separate
        -> transfer               cast to the sampler's dtype, checksummed, split into buckets
        -> the engine             by reference, shared memory, HTTP or NCCL, into the sampler's layers
        -> compare                checksums of the loaded weights against those sent

`weight_sync` decides when to sync, and starts over if the sampler is lost; `sampler` is the interface of engines.
docs/weights.md draws the route.
"""
