"""Checked plan: a request with everything that was resolved for one deployment, without its payloads."""

from dataclasses import dataclass
from functools import cached_property

from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import has_images
from trocar_server.engine.execute.collecting import PassSpec
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.host.gradient_meta_pass import make_pass_spec
from trocar_server.engine.request.plan import Plan, Signature, row_count
from trocar_server.engine.resolve.pass_work import pass_work
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, resolve


def needed_bytes(deployment: Deployment, resolved: Resolved, signature: Signature) -> int:
    """Return the peak bytes of a pass, its own tree included where the model writes to itself."""
    return resolved.memory_bytes(signature, deployment.hosted.pristine.copied_bytes)


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """A plan that may run on a deployment, within limits.

    It serves every equal request, as long as its deployment keeps it: see `Deployments.keep_checked`.

    Attributes:
        plan: The request, with the model's names of its arguments.
        deployment: The deployment that it was checked against.
        limits: The limits that it was checked against.
        signature: Of the inputs of a full pass; None where only decoded images tell it.
        recording: A recorded pass on such inputs; None with `resolved`.
        resolved: What the plan means for the deployment; None where the data of the call decides that.
        doubt: The error of an unresolved plan that the data of the call may take back; None without one.
        asked: The request as it was received; None where it is not kept for equal ones.
        is_eager: Whether it is known that it can only run eagerly, and asks for nothing else.
        differed_count: That of the deployment when the check began.
    """

    plan: Plan
    deployment: Deployment
    limits: Limits
    signature: Signature | None = None
    recording: Recording | None = None
    resolved: Resolved | None = None
    doubt: ServiceError | None = None
    asked: Plan | None = None
    is_eager: bool = False
    differed_count: int = 0

    @property
    def is_final(self) -> bool:
        """Whether no data of a call can change it, so that equal requests share it."""
        return self.resolved is not None and not self.resolved.needs_meta_pass and not self.plan.sources

    @cached_property
    def rows(self) -> int:
        """Samples of the batch, at least 1."""
        return row_count(self.plan.inputs)

    @cached_property
    def byte_count(self) -> int:
        """Bytes of the values in the reply; 0 where they depend on the inputs."""
        return 0 if self.resolved is None else self.resolved.byte_count

    @cached_property
    def memory_bytes(self) -> int:
        """The peak bytes of the pass; 0 where they depend on the inputs."""
        if self.resolved is None or self.signature is None:
            return 0
        return needed_bytes(self.deployment, self.resolved, self.signature)

    @cached_property
    def work(self) -> int:
        """Multiply-adds of its pass, at least; 0 where they depend on the inputs."""
        if self.resolved is None or self.recording is None:
            return 0
        start = self.plan.start_at
        begins = None if start is None else resolve([start.selector], self.recording)[0][0][0]
        return pass_work(self.resolved, self.recording, begins)

    @cached_property
    def has_images(self) -> bool:
        """Whether any argument of the pass or of its sources is images."""
        return any(map(has_images, (self.plan.inputs, *(source.inputs for source in self.plan.sources))))

    @cached_property
    def no_images(self) -> tuple[list[DecodedImages], list[list[DecodedImages]]]:
        """The images of its arguments and of its sources' arguments, where all are tensors."""
        return [[] for _ in self.plan.inputs], [[[] for _ in source.inputs] for source in self.plan.sources]

    @cached_property
    def argument_names(self) -> list[str]:
        """The name of each argument of the forward; empty where it has none."""
        return [entry.name for entry in self.plan.inputs]

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the model's head reads any of its values, as tokens."""
        return any(tap.reads_tokens for tap in self.plan.taps)

    @cached_property
    def has_operands(self) -> bool:
        """Whether tensors may belong to its taps, edits or objective."""
        plan = self.plan
        return bool(plan.edits or plan.tap_operands or plan.objective_operands)

    @cached_property
    def has_more_than_inputs(self) -> bool:
        """Whether tensors other than its inputs may be sent."""
        return self.has_operands or bool(self.plan.sources)

    @cached_property
    def are_keywords(self) -> bool:
        """Whether each argument is passed by its name, as it is."""
        return self.deployment.hosted.forward.takes_as_keywords(self.argument_names)

    @cached_property
    def is_traced(self) -> bool:
        """Whether it needs the nodes of the traced graph."""
        return "fx" in self.deployment.kinds(self.plan.taps, self.plan.edits)

    @cached_property
    def pass_spec(self) -> PassSpec | None:
        """Specification of its pass, where that is the same for every call: values alone."""
        if self.resolved is None or not self.resolved.surgery.is_nothing or self.is_traced:
            return None
        return make_pass_spec(self.resolved, (), (), {})

    @cached_property
    def is_certain(self) -> bool:
        """Whether every pass is the recorded one: values alone, and no number of calls decides which."""
        resolved, spec = self.resolved, self.pass_spec
        if resolved is None or spec is None or self.plan.start_at is not None or self.plan.sources:
            return False
        return resolved.is_counted and not spec.calls
