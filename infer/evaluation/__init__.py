"""What the cache's rounding costs a model: suites that each measure one thing, for any number of variants.

A suite is a function of the loaded model, the variants and its own settings that returns plain, JSON-ready
values; `infer.evaluate` is the command that runs them and `report` what a person reads.
"""
