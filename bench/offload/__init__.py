"""Updates of an optimizer whose state lies on tiers, beside the limits of its paths and others.

cases.py is the table of what is measured; process.py measures one case in a process of its own;
run.py takes turns with all of them. Not here: DeepSpeed (bench/peers/deepspeed_offload.py).
"""
