"""From a composed config to N running ranks, and back to one result."""

from project.launch import start_up

start_up.begin()
