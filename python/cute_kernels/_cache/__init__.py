"""What `KVCache` is made of: pages and sequences, storage on the device, operations, the decoding step."""
