"""The ablation: each arm is another one."""

from __future__ import annotations

from scdiva.tokenizer import load_vocabulary


def test_every_arm_has_a_configuration_of_its_own(script):
    arms, genes = script("_ablation_arms"), load_vocabulary("human")
    told = []
    for arm in arms.ARMS.values():
        assert arms.BASES[arm.family] in arms.ARMS
        training = {**(arms.SET_TRAINING if arm.family == arms.SET else arms.TRAINING), **arm.training}
        rest = (arm.start, arm.trains_table, arm.untrained, arm.study, arm.thinning, arm.order)
        told.append(str((arm.family == arms.SET, arms.model_config(arm, genes), sorted(training.items()), rest)))
    assert len(set(told)) == len(told)
