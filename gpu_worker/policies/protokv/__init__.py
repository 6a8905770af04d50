"""ProtoKV: prototypes of chunks and of hash buckets."""
