// Directions that the server keeps for the caller: each to steer a text along, or to be read at its tokens.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { DirectionKind } from "../../gen/trocar_api/v1/direction_pb.js";
import * as api from "../api.js";
import { alongDirection } from "../edits.js";
import { html, number } from "../html.js";
import { options, view } from "../state.js";
import { during } from "../work.js";

const EXAMPLE = 'client.fit_direction(model, texts, labels, name="warm")';

/** `{model, directions}`: those of a model, in the server's order. */
const stored = signal({ model: "", directions: [] });

async function list() {
  const model = view.model.value;
  const reply = await during("Asking for stored directions", () => api.listDirections(model, options()));
  if (reply && view.model.value === model) stored.value = { model, directions: reply };
}

/** Directions by their name, each an array with one for each place. */
const named = (directions) => [...new Set(directions.map(({ name }) => name))]
  .map((name) => [name, directions.filter((one) => one.name === name)]);

/** The one with the best score, the first of several. */
const bestOf = (places) => places.reduce((best, one) => ((one.score ?? -Infinity) > (best.score ?? -Infinity) ? one : best));

/** How a direction was made and how good it is, in words. */
function aboutOf({ kind, classes, vectorCount, scoreName, score }) {
  const ways = classes.length === 2 ? `from ${classes[0]} to ${classes[1]}` : vectorCount > 1 && `${vectorCount} vectors`;
  const rated = score !== undefined && `${scoreName.replaceAll("_", " ")} ${number(score, 3)}`;
  return [DirectionKind[kind].toLowerCase().replaceAll("_", " "), ways, rated].filter(Boolean).join(", ");
}

/** An edit with a direction: of several vectors only the projection can be used, and units of norms where they are known. */
const editOf = ({ name, place, vectorCount, meanNorm }) =>
  alongDirection(vectorCount === 1 ? "steer" : "project_out", place, name, meanNorm > 0 ? "norm" : "raw");

function Place({ name, places, place, onGive }) {
  if (places.length === 1) return html`<span>at ${place}</span>`;
  return html`<label>at <select aria-label="Place of ${name}" value=${place} onChange=${(event) => onGive(event.target.value)}>
    ${places.map((one) => html`<option key=${one.place}>${one.place}</option>`)}</select></label>`;
}

function Named({ name, places, onEdit, onRead }) {
  const [place, setPlace] = useState(null);
  const one = places.find((other) => other.place === place) ?? bestOf(places);
  return html`
    <li><strong>${name}</strong> <${Place} name=${name} places=${places} place=${one.place} onGive=${setPlace} />
      <span class="hint">${one.problem || aboutOf(one)}</span>
      <button onClick=${() => onEdit(editOf(one))} aria-label="Edit with ${name} at ${one.place}">Edit</button>
      <button onClick=${() => onRead({ name, at: one.place })} aria-label="Read ${name} at ${one.place}">Read</button></li>`;
}

/** @param onEdit gets an edit with a direction; @param onRead gets `{name, at}` of one to read */
export function StoredDirections({ onEdit, onRead }) {
  const model = view.model.value;
  useEffect(() => { list(); }, [model]);
  const isListed = stored.value.model === model;
  const all = isListed ? named(stored.value.directions) : [];
  return html`
    <details class="stored" onToggle=${(event) => { if (event.target.open) list(); }}><summary>Stored directions (${all.length})</summary>
      ${all.length > 0
        ? html`<ul class="directions">${all.map(([name, places]) => html`<${Named} key=${name} name=${name} places=${places} onEdit=${onEdit} onRead=${onRead} />`)}</ul>`
        : isListed && html`<p class="hint">There are none for this model. <code>${EXAMPLE}</code> makes one, in Python.</p>`}
    </details>`;
}
