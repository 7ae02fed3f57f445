// The module tree: shapes, parameters and calls, searched by selectors.
import { computed } from "@preact/signals";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { count, html } from "../html.js";
import { costsOf } from "../cost.js";
import { Field } from "./field.js";
import { chooseModule, found, modules, search, view } from "../state.js";

const costs = computed(() => costsOf(modules.value));

function nested(listed) {
  const root = { children: new Map() };
  for (const module of listed) {
    if (!module.path) continue;
    let node = root;
    let path = "";
    for (const name of module.path.split(".")) {
      path = path ? `${path}.${name}` : name;
      if (!node.children.has(name)) node.children.set(name, { name, path, children: new Map() });
      node = node.children.get(name);
    }
    node.module = module;
  }
  return [...root.children.values()];
}

const outputOf = (module) => module?.calls[0]?.outputs.find((one) => one.tensor);

function shapeOf(module) {
  return outputOf(module)?.tensor.shape.map(Number).join("×") ?? "";
}

/** What the dimensions of the first tensor mean, for the tooltip of its shape. */
function meaningOf(module) {
  return (outputOf(module)?.axes ?? []).map((name) => name || "-").join(" × ");
}

function Row({ path, name, module, children }) {
  const cost = costs.value.get(path);
  const isChosen = view.module.value === path;
  return html`
    <li>
      <button aria-current=${String(isChosen)} data-path=${path} class="module ${isChosen ? "chosen" : ""}"
              disabled=${!module?.calls.length} onClick=${() => chooseModule(path)}
              title=${module?.calls.length ? module.description : "does not run in this model's pass"}>
        <span class="name">${name}</span>
        <span class="type">${module?.type}</span>
        <span class="numbers">
          <span title=${meaningOf(module) || null}>${shapeOf(module)}${module?.calls.length > 1 ? ` @${module.calls.length}` : ""}</span>
          ${module?.parameterCount ? html`<span>${count(module.parameterCount)} parameters</span>` : ""}
          ${cost ? html`<span>${count(cost)} MAC</span>` : ""}
        </span>
      </button>
      ${children}
    </li>`;
}

function Branch({ node, level }) {
  const children = [...node.children.values()];
  const holdsChosen = view.module.value.startsWith(`${node.path}.`);
  const [isOpen, setOpen] = useState(level < 2 || holdsChosen);
  const row = { path: node.path, name: node.name, module: node.module };
  if (!children.length) return html`<${Row} ...${row} />`;
  return html`
    <${Row} ...${row}>
      <button class="fold" aria-expanded=${String(isOpen)} aria-label="${isOpen ? "Fold" : "Unfold"} ${node.path}" onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"}</button>
      ${isOpen && html`<ul>${children.map((one) => html`<${Branch} key=${one.path} node=${one} level=${level + 1} />`)}</ul>`}
    </${Row}>`;
}

/** Scrolls the tree, and nothing around it, to the chosen module. */
function show(tree) {
  const row = tree.querySelector("[aria-current=true]")?.getBoundingClientRect();
  const own = tree.getBoundingClientRect();
  if (row && (row.top < own.top || row.bottom > own.bottom)) tree.scrollTop += row.top - own.top - own.height / 3;
}

export function Tree() {
  const tree = useRef(null);
  const paths = found.value;
  useLayoutEffect(() => show(tree.current), [view.module.value, modules.value, paths]);
  const byPath = new Map(modules.value.map((one) => [one.path, one]));
  return html`
    <section ref=${tree} class="tree" aria-label="Modules">
      <${Field} type="search" class="search" placeholder="layer*.0.conv1, **:Conv2d" aria-label="Search modules by name or selector"
             value=${view.search.value} onGive=${search} />
      ${paths && html`<p class="hint" role="status">${paths.length === 1 ? "1 module" : `${paths.length} modules`}</p>`}
      <ul aria-label="Modules of ${view.model.value}">
        ${paths
          ? paths.map((path) => html`<${Row} key=${path} path=${path} name=${path || "(the model)"} module=${byPath.get(path)} />`)
          : nested(modules.value).map((node) => html`<${Branch} key=${node.path} node=${node} level=${1} />`)}
      </ul>
    </section>`;
}
