"""Is this machine ready? What ``python -m project.doctor`` looks at, a module for each kind of thing."""
