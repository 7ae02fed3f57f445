"""Resolution of a plan for inputs of a signature, with the checks that follow from it."""

from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import predicted_signature
from trocar_server.engine.host.checked_plan import needed_bytes
from trocar_server.engine.host.deployment import Deployment, RecordedSources
from trocar_server.engine.request.plan import Plan, Signature
from trocar_server.engine.resolve.pass_memory import check_memory
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.run.start_value import Start, check_after_start, find_start, start_signature
from trocar_server.surgery import PassGuard, Recording

NO_SOURCES: RecordedSources = {}


def known_signature(deployment: Deployment, plan: Plan) -> Signature | None:
    """Return the input signature of a full pass, where it is known before any image is decoded.

    Raises:
        ServiceError: The inputs do not fit the model, or no pass can start where the plan says.
    """
    if plan.start_at is not None:
        return start_signature(deployment, plan, plan.start_at)
    if not plan.inputs:  # only parameters are wanted
        return deployment.example_signature
    return predicted_signature(deployment.hosted, plan.inputs)


def resolve_plan(
    deployment: Deployment,
    plan: Plan,
    signature: Signature,
    recording: Recording,
    limits: Limits,
    sources: RecordedSources = NO_SOURCES,
) -> tuple[Resolved, Start | None]:
    """Check a plan against a recorded pass on inputs of its signature.

    Raises:
        ServiceError: Any error of its taps, edits, objective, start or the size of its reply.
    """
    resolved = deployment.resolve(plan, signature, recording, limits.max_reply_bytes, sources)
    check_memory(needed_bytes(deployment, resolved, signature), limits.max_pass_bytes)
    if plan.start_at is None:
        return resolved, None
    start = find_start(plan, plan.start_at, signature, recording)
    check_after_start(resolved, start, plan.start_at, recording)
    return resolved, start


def resolve_with_meta_pass(
    deployment: Deployment,
    plan: Plan,
    resolved: Resolved,
    signature: Signature,
    limits: Limits,
    sources: RecordedSources,
    guard: PassGuard,
) -> Resolved:
    """Check memory and available gradients by a gradient meta pass. Owner thread only.

    Raises:
        ServiceError: `PASS_TOO_LARGE`, or an error of the objective.
    """
    resolved = deployment.run_meta_pass(plan, resolved, signature, sources, guard)
    check_memory(needed_bytes(deployment, resolved, signature), limits.max_pass_bytes)
    return resolved
