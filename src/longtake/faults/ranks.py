"""Faults in which ranks that should be equal differ: in recipe, in weights, in a flipped bit."""

from longtake.faults import sandbox as sites
from longtake.faults.expect import Evidence
from longtake.faults.registry import fault

_FLIP_STEP = 21  # the next checkpoint is of step 25, and copies are compared before step 25
_MOST_SHOWN = 400


@fault(
    does="Gives one rank of two a recipe with another learning rate.",
    must="No step is trained; the message names the key, both values and both ranks.",
)
def recipe_differs_on_a_node(site: sites.TrainingSite, evidence: Evidence) -> None:
    said = _train_nothing(evidence, "other-rate-on-rank-1")
    wanted = ("optimizer.learning_rate is", "0.003 on", "(rank 0)", "0.006 on", "(rank 1)")
    evidence.expect_output(said, "would not train the same", *wanted)


@fault(
    does="Lets one rank of two read a frozen weight that is a little larger.",
    must="No step is trained; the message names both ranks and the weight.",
)
def weights_differ_on_a_node(site: sites.TrainingSite, evidence: Evidence) -> None:
    # Without LoRA all weights of the model are trained, and none is frozen.
    lora = ("trainable.kind=lora", "trainable.rank=2")
    said = _train_nothing(evidence, "other-weights-on-rank-1", *lora)
    wanted = ("Copies of the weights are unlike before step 1", "rank 0 (", "rank 1 (")
    evidence.expect_output(said, *wanted, "They differ in 1 of")


@fault(
    does="Flips the lowest bit of one weight on one rank of three, in one step.",
    must="It is named before a checkpoint has it; the run rolls back, and the end is bitwise same.",
    compared_with="undisturbed_on_three_ranks",
)
def bit_flips_in_one_replica(site: sites.TrainingSite, evidence: Evidence) -> None:
    # Three copies, so that the majority shows which one is wrong.
    inject = sites.Injection("flip-bit-on-rank-1", _FLIP_STEP)
    with site.launch(*sites.ON_THREE_RANKS, ranks=3, inject=inject) as process:
        process.finish()
    # One rollback, at the next comparison, to a checkpoint of before the flip.
    rollbacks = site.run.rollbacks()
    evidence.expect(len(rollbacks) == 1, f"it rolled back {len(rollbacks)} times, not once")
    for each in rollbacks[:1]:
        evidence.detected_steps = late = each["from_step"] - _FLIP_STEP
        in_time = 0 < late <= sites.COMPARED_EVERY and each["to_step"] <= _FLIP_STEP
        steps = f"from step {each['from_step']} to {each['to_step']}"
        evidence.expect(in_time, f"it went back {steps}, not at once from step {_FLIP_STEP}")
        evidence.expect(each["reason"] == "replicas", f"it was taken for {each['reason']}")
        first, end = each["skipped"]
        evidence.expect(first == end, f"batches {first} to {end - 1} were skipped")
        wanted = ("rank 1 (", "is alone", "differ in 1 of", sites.NAN_PARAMETER)
        evidence.expect_output(each["message"], *wanted)
        evidence.message = f"It went back {steps} and said: {each['message']}"
    evidence.expect_undisturbed()


def _train_nothing(evidence: Evidence, kind: str, *changes: str) -> str:
    """Expect that two unequal ranks end with an error before the first step; return the message."""
    site, inject = evidence.site, sites.Injection(kind, 0)
    with site.launch(*sites.ON_TWO_RANKS, *changes, ranks=2, inject=inject) as process:
        code = process.wait()
        output = " ".join(process.output.split())
    evidence.expect(code != 0, "it ended as if all were well")
    evidence.expect(not site.run.metrics_path.exists(), "steps were trained")
    # Several ranks may print the message at the end; the first copy is enough.
    said = output.partition("longtake: ")[2].partition(" longtake: ")[0]
    evidence.message = f"It said: {said[:_MOST_SHOWN]}"
    return said
