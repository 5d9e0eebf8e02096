"""A reward model on SmolLM2-135M-Instruct: pairs a second, against TRL. How: see methods.py.

python benchmarks/reward.py [--only fixed varied] [--sides ours trl-1.16.0] [--repeat 3]
"""

from methods import Targets, main

TARGETS: Targets = {(scenario, "trl-1.16.0", "default"): 1.6 for scenario in ("fixed", "varied")}

if __name__ == "__main__":
    main("reward", __doc__ or "", TARGETS)
