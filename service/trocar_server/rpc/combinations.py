"""What of a plan does not go together, whatever the model."""

from trocar_server.engine.plan import Plan
from trocar_server.rpc.fields import invalid


def check_combination(plan: Plan) -> None:
    """Refuse a plan whose parts exclude each other.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    _check_gradients(plan)
    nodes = [tap.selector.text for tap in plan.taps if tap.selector.kind == "fx"]
    if nodes and (plan.edits or plan.objective is not None):
        raise invalid(
            "taps",
            f"'{nodes[0]}' is computed from the traced graph, where edits and gradients do not reach; "
            "select a module, or ask for nodes in a call of their own",
        )


def _check_gradients(plan: Plan) -> None:
    tapped = [tap.selector.text for tap in plan.taps if tap.selector.is_gradient]
    edited = [request.selector.text for request in plan.edits if request.selector.is_gradient]
    if plan.objective is None:
        for text in (*tapped, *edited):
            raise invalid(
                "objective",
                f"'{text}' is a gradient, and nothing says of what; give an objective: in Python `of=`, "
                "for example of=trocar.logit(207), on the command line `trocar gradients`",
            )
        return
    if plan.start_at is not None:
        raise invalid("start_at", "gradients start at the input; leave start_at out, or the objective")
    if not tapped:
        raise invalid(
            "objective",
            "no tap asks for a gradient; tap one, for example `layer4/grad_out`, in Python `at=`, "
            "or leave the objective out",
        )
