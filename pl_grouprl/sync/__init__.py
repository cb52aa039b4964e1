"""The policy's weights on their way from the trainer to a sampler that has a copy of them.

    strategy.named_weights      whole weights, one at a time, gathered by all ranks
      -> stream                 checkpoint names and values; adapters merged (`merge`) or kept apart
      -> transfer               cast to the sampler's dtype, checksummed, cut into buckets
      -> the engine             by reference, HTTP or NCCL, into the sampler's layers
      -> compare                checksums of what the layers compute with against those of what was sent

`weight_sync` decides when that happens, and starts over if the sampler is lost; `sampler` says what an engine
implements. docs/rollouts.md draws the route.
"""
