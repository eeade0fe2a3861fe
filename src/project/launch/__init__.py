"""From a composed config to N running ranks, and back to one result."""
