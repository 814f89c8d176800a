"""FCP context parallelism: packed sequences, any placement, congestion-free rounds."""
