"""DPO of SmolLM2-135M-Instruct, a frozen copy as reference: pairs a second, against TRL. How: see methods.py.

python benchmarks/dpo.py [--only fixed varied] [--sides ours trl-1.16.0] [--repeat 3]
"""

from methods import Targets, main

TARGETS: Targets = {
    ("fixed", "trl-1.16.0", "default"): 2.5,
    ("varied", "trl-1.16.0", "default"): 2.2,
    ("varied", "trl-1.16.0", "best"): 1.4,
}

if __name__ == "__main__":
    main("dpo", __doc__ or "", TARGETS, memory=0.7)
