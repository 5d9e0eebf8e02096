"""KTO of SmolLM2-135M-Instruct, a frozen copy as reference: labelled rows a second, against TRL. How: see methods.py.

python benchmarks/kto.py [--only fixed varied] [--sides ours trl-1.16.0] [--repeat 3]
"""

from methods import Targets, main

TARGETS: Targets = {(scenario, "trl-1.16.0", "default"): 2.5 for scenario in ("fixed", "varied")}

if __name__ == "__main__":
    main("kto", __doc__ or "", TARGETS, memory=0.7)
