"""Text spans: tokens that taps, edits and objectives select by text, by the roles of a chat, or by position.

    plan = with_token_rows(plan, unprocessed, made)

Once the texts are tokenized, `Spans` become `TokenRows`, so everything behind knows the size of each value.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.objective import (
    ClassScore,
    Leaf,
    Objective,
    ValueScore,
)
from trocar_server.engine.request.plan import EditRequest, Plan, TapRequest
from trocar_server.engine.resolve.text_positions import TokenizedTexts
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import (
    ProcessedInput,
    ProcessorInput,
    TextInput,
)
from trocar_server.tensors.reductions import Positions, Reduction, Spans, TokenRows

_Resolve = Callable[[Reduction], Reduction]
_Numbers = Callable[[Positions | None], Positions | None]


def has_spans(plan: Plan) -> bool:
    """Whether a tap, an edit or the objective of a plan selects tokens by where they are in their text."""
    return next(_spans(plan), None) is not None


def refuse_spans(plan: Plan) -> None:
    """Refuse a plan that still has spans: its inputs are not texts.

    Raises:
        ServiceError: `REDUCTION_REJECTED`.
    """
    if (span := next(_spans(plan), None)) is not None:
        problem = "only texts that the server tokenizes have characters; send texts, or give positions"
        if isinstance(span, Positions):
            problem = "the inputs are neither texts nor their token ids; give tokens= of the value"
        raise _rejected(f"{span}: {problem}")


def with_token_rows(
    plan: Plan,
    unprocessed: Sequence[ProcessorInput],
    made: Sequence[ProcessedInput],
    arrays: TokenizedTexts | None = None,
) -> Plan:
    """Return a plan whose spans are positions in its texts; without texts, as it is.

    Args:
        plan: The plan.
        unprocessed: Its texts and sound, as they were sent.
        made: What the processor made of each of them.
        arrays: Texts that were sent as arrays of token ids, for positions.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, or of an edit `EDIT_NOT_POSSIBLE`: a span has no token, there are
            not as many spans as texts, or no texts of the decoder. `INVALID_ARGUMENT`: see
            `TokenizedTexts.rows`.
    """
    pairs = zip(unprocessed, made, strict=True)
    texts = [(given, done) for given, done in pairs if isinstance(given, TextInput)]
    if not texts and arrays is None:
        return plan

    tokens = TokenizedTexts.of_processed(*_own_texts(texts, is_decoder=False)) if texts else arrays

    def resolve(reduction: Reduction) -> Reduction:
        if isinstance(reduction, Spans) and texts:
            return _token_rows(reduction, *_texts_of(reduction, texts))
        if isinstance(reduction, Positions) and tokens is not None:
            return tokens.rows(reduction)
        return reduction

    def numbers(positions: Positions | None) -> Positions | None:
        return positions if positions is None or tokens is None else tokens.of_prompt(positions)

    taps = tuple(_tap(index, tap, resolve, numbers) for index, tap in enumerate(plan.taps))
    objective = None if plan.objective is None else _objective(plan.objective, resolve)
    edits = tuple(_edit(index, request, resolve, numbers) for index, request in enumerate(plan.edits))
    return replace(plan, taps=taps, edits=edits, objective=objective)


def _spans(plan: Plan) -> Iterator[Spans | Positions]:
    of_edits = (request.edit.region.tokens for request in plan.edits)
    yield from (entry for entry in (*_reductions(plan), *of_edits) if isinstance(entry, Spans | Positions))
    yield from plan.read_positions


def _reductions(plan: Plan) -> Iterator[Reduction]:
    for tap in plan.taps:
        yield from tap.reductions
    if plan.objective is not None:
        yield from plan.objective.reductions


def _tap(index: int, tap: TapRequest, resolve: _Resolve, numbers: _Numbers) -> TapRequest:
    with _named(f"taps[{index}]", tap, ErrorReason.REDUCTION_REJECTED):
        reductions = tuple(map(resolve, tap.reductions))
        return replace(tap, reductions=reductions, positions=numbers(tap.positions))


@contextmanager
def _named(field: str, entry: TapRequest | EditRequest, reason: ErrorReason) -> Iterator[None]:
    """Add the place of a tap or an edit to errors; of reductions with a reason of their own."""
    try:
        yield
    except ServiceError as error:
        reason = reason if error.reason is ErrorReason.REDUCTION_REJECTED else error.reason
        details = {"field": f"{field}.positions"} if reason is ErrorReason.INVALID_ARGUMENT else {}
        message = f"{field} at '{entry.selector.text}': {error.message}"
        raise ServiceError(reason, message, **{**error.details, **details}) from None


def _edit(index: int, request: EditRequest, resolve: _Resolve, numbers: _Numbers) -> EditRequest:
    region = request.edit.region
    with _named(f"edits[{index}]", request, ErrorReason.EDIT_NOT_POSSIBLE):
        request = replace(request, positions=numbers(request.positions))
        if region.tokens is None:
            return request
        tokens = resolve(region.tokens)
    assert isinstance(tokens, Spans | Positions | TokenRows)  # without texts it is as it was
    return replace(request, edit=replace(request.edit, region=replace(region, tokens=tokens)))


def _texts_of(
    wanted: Spans, given: Sequence[tuple[TextInput, ProcessedInput]]
) -> tuple[TextInput, ProcessedInput]:
    """Return the texts that spans are of."""
    if wanted.is_decoder and not any(texts.name for texts, _ in given):
        raise _rejected(f"{wanted} of the decoder: no texts of the decoder were sent; call them decoder_text")
    return _own_texts(given, is_decoder=wanted.is_decoder)


def _own_texts(
    given: Sequence[tuple[TextInput, ProcessedInput]], *, is_decoder: bool
) -> tuple[TextInput, ProcessedInput]:
    """Return the texts of the decoder, which have a name, or else the others."""
    own = [pair for pair in given if bool(pair[0].name) == is_decoder]
    return (own or given)[0]


def _objective(objective: Objective, resolve: _Resolve) -> Objective:
    with _named_objective():
        return objective.mapped(lambda leaf: _resolved(leaf, resolve))


@contextmanager
def _named_objective() -> Iterator[None]:
    """Name the objective in errors of positions."""
    try:
        yield
    except ServiceError as error:
        if error.reason is not ErrorReason.INVALID_ARGUMENT:
            raise
        details = {"field": "objective.positions", **error.details}
        raise ServiceError(error.reason, f"objective: {error.message}", **details) from None


def _resolved(leaf: Leaf, resolve: _Resolve) -> Leaf:
    if isinstance(leaf, ClassScore) and leaf.positions is not None:
        rows = resolve(leaf.positions)
        assert isinstance(rows, Positions | TokenRows)
        return replace(leaf, positions=rows)
    if isinstance(leaf, ValueScore):
        return replace(leaf, reductions=tuple(map(resolve, leaf.reductions)))
    return leaf


def _token_rows(wanted: Spans, given: TextInput, made: ProcessedInput) -> TokenRows:
    tokens = TokenizedTexts.of_processed(given, made)
    count = len(tokens.texts)
    if len(wanted.spans) not in (1, count):
        raise _rejected(f"{len(wanted.spans)} spans for {count} texts; give one for all, or one for each")
    spans = wanted.spans * count if len(wanted.spans) == 1 else wanted.spans
    of_texts = zip(spans, tokens.texts, tokens.own, strict=True)
    rows = tuple(
        tuple(own[place] for place in text.find(span, must_occur=True)) for span, text, own in of_texts
    )
    return TokenRows(rows, tokens.padded_length, tuple(own[0] for own in tokens.own))


def _rejected(problem: str, **metadata: str) -> ServiceError:
    return ServiceError(ErrorReason.REDUCTION_REJECTED, problem, **metadata)
