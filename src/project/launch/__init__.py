"""From a composed config to N running ranks, and back to one result."""

from project.launch import early_interrupt

early_interrupt.begin()
