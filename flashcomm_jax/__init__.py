"""FlashComm: tensor-parallel prefill on token shards, without all-reduce."""
