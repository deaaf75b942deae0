"""Private names of torch, Python and Lightning: one module per concern, with the versions in which they were checked.

A test in tests/unit/compat fails when a new version changes a name. At run time, the feature that needs an absent name
disables itself with one warning, or does the same more slowly with public names.
"""
