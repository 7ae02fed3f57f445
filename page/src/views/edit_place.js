// Where a new edit is: at a value of the chosen module, a parameter, or a gradient.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { SelectorKind } from "../../gen/trocar_api/v1/tap_pb.js";
import * as api from "../api.js";
import { isOfGradient, isOfParameter } from "../edits.js";
import { html } from "../html.js";
import { best, collected, input, module, options, statisticsTap, view } from "../state.js";

const MOST_ELEMENTS = 2_500_000;

/** `{key, names}`: selectors of the parameters and buffers of the chosen module. */
const owned = signal({ key: "", names: [] });
/** `{key, value}`: the parameter that is edited. */
const parameter = signal({ key: "", value: null });

async function findOwned(key) {
  const tap = { parts: { kind: SelectorKind.MODULE, path: view.module.value, port: "param(*)" } };
  const maps = await api.expand(view.model.value, input.value, tap, options()).catch(() => []); // a module without any
  owned.value = { key, names: maps.map(({ name }) => name) };
}

/** `[selector, label]` of each place. */
function placesOf(names, takesGradients) {
  const shown = collected.value[0]?.map.name;
  if (!shown) return [];
  const { pick } = collected.value[0].map; // stays behind the port, as in `layer/in[0]`
  const value = pick && shown.endsWith(pick) ? shown.slice(0, -pick.length) : shown;
  const port = { in: "its input", pattern: "its attention" }[view.port.value];
  const own = names.map((name) => [name, `parameter ${name.slice(name.lastIndexOf("(") + 1, -1)}`]);
  const hasGradients = takesGradients && best.value.length && !shown.endsWith("/pattern");
  return [
    [shown, port ?? "its output"], ...(port ? [] : [[`${value}/in`, "its input"]]), ...own,
    ...(hasGradients ? [[`${value.replace(/\/in$/, "")}/grad_${port ? "in" : "out"}${pick}`, `gradient of ${port ?? "its output"}`]] : []),
    ...(hasGradients ? own.map(([name, label]) => [name.replace("/param(", "/param_grad("), `gradient of ${label}`]) : []),
  ];
}

/** @param chosen a signal: the label of a place, empty for the first; @param onAdd gets its selector; @param takesGradients whether gradients can be edited */
export function EditPlace({ chosen, onAdd, takesGradients = true }) {
  const key = JSON.stringify([view.model.value, view.module.value, input.value?.kind]);
  useEffect(() => { if (view.module.value && input.value) findOwned(key); }, [key]);
  const places = placesOf(owned.value.key === key ? owned.value.names : [], takesGradients);
  if (!places.length) return html`<p class="hint">Choose a module to change.</p>`;
  const [place] = places.find(([, label]) => label === chosen.value) ?? places[0];
  return html`
    <div class="controls"><label>Place <select value=${chosen.value || places[0][1]} onChange=${(event) => { chosen.value = event.target.value === places[0][1] ? "" : event.target.value; }}>
      ${places.map(([at, label]) => html`<option key=${at} value=${label}>${label}</option>`)}</select></label>
      <button class="add" onClick=${() => onAdd(place)}>Add an edit of ${place}</button></div>`;
}

async function readParameter(at, key) {
  const tap = { ...statisticsTap, selector: at };
  const found = await api.extract(view.model.value, input.value, { taps: [tap] }, options()).catch(() => null); // the pass with it tells
  if (found) parameter.value = { key, value: found.maps[0] };
}

/** `{map, tensor}` of what an edit changes: of `before`, or a parameter; null where it is not known. */
export function useEditedValue(edit, before) {
  const isRead = Boolean(edit && input.value && isOfParameter(edit) && !isOfGradient(edit)
    && (module.value?.parameterCount ?? 0) <= MOST_ELEMENTS);
  const key = isRead ? JSON.stringify([view.model.value, edit.at]) : "";
  useEffect(() => { if (key && parameter.value.key !== key) readParameter(edit.at, key); }, [key]);
  if (isRead) return parameter.value.key === key ? parameter.value.value : null;
  return before.find(({ map }) => map.name === edit?.at) ?? null;
}
