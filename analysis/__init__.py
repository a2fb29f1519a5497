"""From records to a decision: `python -m analysis report | decide | compare | index | check`.

Reads what `python -m benchmarks` left under `results/runs/`; needs neither torch nor packckpt.
"""
