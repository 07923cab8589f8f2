"""Who works where on what: pure decisions from a description of the machine."""
