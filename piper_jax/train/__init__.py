"""Training from a configuration: data, optimizer, loop, metrics, comparison with one device."""
