"""Faults of ranks that should be equal: another recipe, other weights, a flipped bit."""

from longtake.faults.expect import Evidence
from longtake.faults.registry import fault
from longtake.faults.sandbox import ON_TWO_RANKS, Injection, InjectionKind, Sandbox, TrainingSite


@fault(
    "recipe-differs-on-a-node",
    does="Gives one rank of two a recipe with another learning rate.",
    must="No step is trained; the message names the key, both values and both ranks.",
)
def recipe_differs_on_a_node(sandbox: Sandbox) -> Evidence:
    site, evidence = sandbox.fresh("recipe-differs-on-a-node"), Evidence()
    _expect_refusal(
        *(evidence, site, "other-rate-on-rank-1"),
        *("optimizer.learning_rate is", "0.003 on", "(rank 0)", "0.006 on", "(rank 1)"),
    )
    return evidence


def _expect_refusal(
    evidence: Evidence, site: TrainingSite, kind: InjectionKind, *wanted: str
) -> None:
    """Expect that two ranks end before the first step, with an error that says what is wanted."""
    with site.launch(*ON_TWO_RANKS, ranks=2, inject=Injection(kind, 0)) as process:
        code = process.wait()
        output = " ".join(process.output.split())
    evidence.expect(code != 0, "it ended as if all were well")
    evidence.expect_output(output, "longtake: The 2 ranks would not train the same", *wanted)
    evidence.expect(not site.run.metrics_path.exists(), "steps were trained")
    said = output.partition("would not train the same: ")[2]
    evidence.message = f"It said: {said.partition(' Start all')[0]}"
