"""The replica of the store in a bucket: Litestream as a child of the leader, what it begins from, and when a write is durable."""
